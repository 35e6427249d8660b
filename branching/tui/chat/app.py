"""`branching chat`: a conversation with an agent that can be forked, on a screen of 80 by 24.

    line 1      the model, the fork in numbers
    line 2      a chip for the overview and for each branch
    overview    while a fork is open: a line for each branch
    transcript  of the open tab, and below it the message that is being received
    last line   the input

The session (`session`) has the state and the logic. This module renders it: states twice a second,
the message being received ten times a second, and only if they have changed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input, Static

from branching import _difftool
from branching._exit_codes import EXIT_OURS
from branching._threads import WAITING_MAX, QueueThread
from branching.agent.branch_runtime import BranchRuntime
from branching.errors import BranchingError
from branching.tui.chat.protocols import Wanted
from branching.tui.chat.session import ChatSession
from branching.tui.chat.transcripts import OVERVIEW
from branching.tui.dialogs import Question
from branching.tui.diff.diff_screen import DiffScreen
from branching.tui.diff.diff_sources import ReportSource
from branching.tui.fork_picker import ForkPicker
from branching.tui.formatting import filled, mark, money, plain, shortened, style, turns_text, word
from branching.tui.merge_picker import Acceptance, Choice, MergePicker
from branching.tui.terminal import TerminalDriver, leave_on_signals, suspended_terminal
from branching.tui.transcript_view import TranscriptView

STATES_SECONDS = 0.5
WORDS_SECONDS = 0.1
LABEL_WIDTH = 12
WINDOW_SECONDS = 1
"""After which an editor that has not failed has its window."""


class Prompt(Input):
    """The input line. It is cleared immediately after Enter, so that the next line can be typed."""

    async def on_key(self, event: events.Key) -> None:
        """Takes Enter before it goes round by the bindings: keys behind it would overtake it."""
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            await self.action_submit()

    async def action_submit(self) -> None:
        text = self.value
        self.value = ""
        self.post_message(self.Submitted(self, text))

    def receive(self, event: events.Key | events.Paste) -> None:
        """Receives the text typed while a dialog did not accept answers yet."""
        if isinstance(event, events.Paste) or event.is_printable or event.key == "enter":
            self.post_message(event)
        elif event.key == "backspace":
            self.action_delete_left()


@dataclass(frozen=True)
class Tab:
    """One branch in the row."""

    name: str
    state: str


def chips_text(tabs: Sequence[Tab], chosen: int, width: int) -> Text:
    """Draws as many chips as there is room for, the chosen one among them."""
    drawn = [f" {index + 1} {mark(tab.state)} {tab.name} " for index, tab in enumerate(tabs)]
    first = 0
    while first < chosen and sum(map(cell_len, drawn[first : chosen + 1])) > width - 2:
        first += 1
    text = Text(no_wrap=True, overflow="ellipsis")
    if first:
        text.append("<", "dim")
    for index in range(first, len(drawn)):
        look = style(tabs[index].state)
        text.append(drawn[index], f"{look} reverse".strip() if index == chosen else look)
    return text


class TabBar(Static):
    """The row as a widget."""

    DEFAULT_CSS = "TabBar { height: 1; width: 1fr; }"

    def show(self, tabs: Sequence[Tab], chosen: int) -> None:
        """Draws the chips anew."""
        self.update(chips_text(tabs, chosen, self.size.width or 80))


class Chat(App[None]):
    """The application; it closes the session when it is left."""

    TITLE = "branching chat"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #top { height: 1; text-style: reverse; text-wrap: nowrap; text-overflow: ellipsis; }
    #overview { height: auto; max-height: 10; border-bottom: solid $foreground; }
    #overview { text-wrap: nowrap; text-overflow: ellipsis; }
    #transcript { height: 1fr; }
    #live { height: auto; max-height: 6; }
    #prompt { border: none; border-top: solid $foreground; height: 2; padding: 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "next_tab(1)", priority=True, show=False),
        Binding("shift+tab", "next_tab(-1)", priority=True, show=False),
        Binding("escape", "stop", show=False),
        Binding("ctrl+q", "quit", show=False),
    ]

    def __init__(self, session: ChatSession) -> None:
        # The terminal's own colours; none with NO_COLOR.
        super().__init__(driver_class=TerminalDriver, ansi_color=True)
        self.session = session
        self._reading = QueueThread("reading", WAITING_MAX)
        # Held, not looked up: the timers that draw may still strike while the screen is taken down.
        self._top = Static(id="top")
        self._tabs = TabBar(id="chips")
        self._overview = Static(id="overview")
        self._transcript = TranscriptView("transcript")
        self._live = Static(id="live")
        self._prompt = Prompt(placeholder="type a message, or /help", id="prompt")
        self._drawn: tuple[str, int] = ("", 0)
        self._is_asking = False
        self._postponed: set[Any] = set()

    def compose(self) -> ComposeResult:
        yield from (self._top, self._tabs, self._overview, self._transcript, self._live)
        yield self._prompt

    def on_mount(self) -> None:
        self._prompt.focus()
        leave_on_signals(self._leave)
        self.set_interval(STATES_SECONDS, self._draw_states)
        self.set_interval(WORDS_SECONDS, self._draw_words)
        self._draw_states()

    # Drawing.

    def _draw_states(self) -> None:
        session = self.session
        session.tick()
        if session.tab and session.branch(session.tab) is None:
            session.tab = OVERVIEW
        facts = ["branching chat", session.chat_agent.name, session.badge]
        facts += ["working"] if session.conversation.is_in_flight else []
        self._top.update(Text(" " + " · ".join(filter(None, facts))))
        branches = session.branches
        chips = [Tab("overview", "running" if session.conversation.is_in_flight else "open")]
        chips += [Tab(_label(branch), branch.status.state) for branch in branches]
        tabs = [OVERVIEW, *(branch.id for branch in branches)]
        self._tabs.show(chips, tabs.index(session.tab))
        overview = self._overview
        overview.display = bool(branches) and session.tab == OVERVIEW
        if overview.display:
            overview.update(Text("\n").join(map(_overview_line, branches)))
        self._ask_for_approval()

    def _draw_words(self) -> None:
        session = self.session
        log = self._transcript
        tab, drawn = self._drawn
        if tab != session.tab:
            log.clear()
            tab, drawn = session.tab, 0
        count = session.said.count(tab)
        if count > drawn:
            log.add(session.said.lines(tab)[drawn - count :])
        self._drawn = (tab, count)
        said = session.said.partial(tab)
        live = self._live
        live.display = bool(said)
        live.update(Text(plain(said)))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables the keys for tabs while a dialog is open."""
        del parameters
        return action not in ("next_tab", "stop") or len(self.screen_stack) == 1

    # Keys and input.

    def action_next_tab(self, step: int) -> None:
        self.session.next_tab(step)
        self._postponed.clear()
        self._draw_states()
        self._draw_words()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "prompt":
            self._submit(event.value)

    @work
    async def _submit(self, text: str) -> None:
        wanted = await self.session.submit(text)
        self._draw_states()
        if wanted is not None:
            await self._give(wanted)

    async def _give(self, wanted: Wanted) -> None:
        if wanted.kind == "fork":
            fork = await self.push_screen_wait(ForkPicker(self.session.settings))
            if fork is not None:
                await self.session.fork(fork.specs, fork.aggregate_usd)
        elif wanted.kind == "pick":
            await self._pick(wanted.text, wanted.branch_id)
        elif wanted.kind == "accept":
            await self._accept(wanted)
        elif wanted.kind == "diff":
            await self._show_diff(wanted.text)
        elif wanted.kind == "copy":
            self.copy_to_clipboard(wanted.text)
            self.session.note("copied, if the terminal allows it")
        else:
            await self.action_quit()
        self._draw_states()

    async def _accept(self, wanted: Wanted) -> None:
        branch = self.session.branch(wanted.branch_id)
        while branch is not None:
            answer = await self.push_screen_wait(
                Acceptance(branch.spec.label, wanted.text, self._prompt.receive)
            )
            if answer == "diff":
                await self._show_diff("")
                continue
            if answer == "accept":
                await self.session.merging.pick(branch.id)
            elif answer == "override":
                await self._pick(wanted.text, branch.id)
            return

    async def _pick(self, why: str, proposed: str) -> None:
        while self.session.is_forked:
            choices = [_choice(branch) for branch in self.session.branches]
            picked = await self.push_screen_wait(
                MergePicker(choices, why, proposed, self._prompt.receive)
            )
            if picked is None:
                return
            proposed = picked.branch_id
            if picked.opens:
                await self._open(proposed)
                continue
            await self.session.merging.pick(proposed)
            return

    async def _open(self, branch_id: str) -> None:
        """`o`: the branch's files beside those of the fork, in an editor or here."""
        branch = self.session.branch(branch_id)
        if branch is None or branch.path is None:
            return
        kind = await self._reading.do(_difftool.EditorDetector.detect)
        if kind == "tui":
            await self._show_diff("")
            return
        opening = partial(self._reading.do, _opened, kind, branch)
        try:
            # A command of the user's may be an editor for the terminal; the others have windows.
            await (suspended_terminal(self, opening) if kind == "custom" else opening())
        except (OSError, ValueError, RuntimeError) as error:
            self.session.note(f"no editor was opened: {error}", "error")

    async def _show_diff(self, path: str) -> None:
        try:
            report = await self.session.coordinator.diff_branches([path] if path else None)
        except (BranchingError, OSError, ValueError) as error:
            self.session.note(str(error), "error")
            return
        await self.push_screen_wait(DiffScreen(ReportSource(report), self._reading))

    @work
    async def action_stop(self) -> None:
        question = self.session.what_escape_stops()
        if question and await self.push_screen_wait(Question(question, [], [("y", "yes")])):
            await self.session.stop()
            self._draw_states()

    @work
    async def _ask_for_approval(self) -> None:
        waiting = [one for one in self.session.approvals() if one[2] not in self._postponed]
        if self._is_asking or not waiting or len(self.screen_stack) > 1:
            return
        self._is_asking = True
        try:
            tab, who, request = waiting[0]
            question = Question(
                f"{who} asks to call {request.tool}",
                request.arguments.splitlines(),
                [("y", "approve"), ("n", "deny")],
                self._prompt.receive,
            )
            answer = await self.push_screen_wait(question)
            if answer:
                self.session.answer(tab, request, "approve" if answer == "y" else "deny")
            else:
                self._postponed.add(request)  # asked again when a tab is opened
        finally:
            self._is_asking = False

    # Leaving.

    async def action_quit(self) -> None:
        self._ask_and_leave()

    @work
    async def _ask_and_leave(self) -> None:
        if self.session.is_forked:
            lines = ["A fork is open. What runs in it is stopped."]
            answers = [("y", "drop its branches")]
            if self.session.can_be_left:
                answers.append(("k", "keep them for the next chat"))
            answer = await self.push_screen_wait(Question("Quit?", lines, answers))
            if not answer:
                return
            self._leave(0, leaves=answer == "k")
            return
        self._leave(0)

    @work(exclusive=True, group="leave")
    async def _leave(self, code: int, *, leaves: bool = True) -> None:
        """Closes the session. After a signal, an open fork is left for the next chat."""
        try:
            await self.session.close(leaves=leaves)
        except (BranchingError, OSError) as error:
            self.exit(return_code=EXIT_OURS, message=f"error: {error}")
            return
        self.exit(return_code=code)


def _opened(kind: _difftool.EditorKind, branch: BranchRuntime) -> None:
    assert branch.path is not None, "only what has files is opened"
    for process in _difftool.EditorDetector.invoke(kind, branch.base_path, [branch.path]):
        try:
            process.wait(timeout=None if kind == "custom" else WINDOW_SECONDS)
        except subprocess.TimeoutExpired:
            pass  # its dialog is open; continue


def _overview_line(branch: BranchRuntime) -> Text:
    status, cost = branch.status, branch.cost()
    text = Text(no_wrap=True, overflow="ellipsis")
    look = style(status.state)
    label = filled(_label(branch), LABEL_WIDTH)
    text.append(f"{mark(status.state)} {label} {word(status.state)}", look)
    text.append(_facts(branch, money(cost.cumulative_usd)))
    return text


def _label(branch: BranchRuntime) -> str:
    return shortened(plain(branch.spec.label), LABEL_WIDTH)


def _choice(branch: BranchRuntime) -> Choice:
    cost = branch.cost()
    return Choice(
        branch_id=branch.id,
        label=plain(branch.spec.label),
        state=branch.status.state,
        facts=_facts(branch, money(cost.cumulative_usd)),
    )


def _facts(branch: BranchRuntime, cost: str) -> str:
    status = branch.status
    budget = branch.budget.usd
    spent = f"{cost or '?'} of {money(budget)}" if budget is not None else cost
    said = status.error or branch.final_message or status.last_message_preview
    paused = "paused" if branch.is_running and branch.pause.is_on else ""
    facts = [paused, turns_text(status.current_turn), spent, plain(said)]
    return " · " + " · ".join(filter(None, facts))
