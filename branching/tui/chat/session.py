"""The state of a chat: the parent's conversation, at most one fork, and the allowed actions.

    idle ── prompt ──> in flight ──> idle
    idle ── fork ──> forked ── merge or abort ──> idle

While a run is in flight, a person cannot fork; the agent can, with the fork tools. Its fork is the
session's: a person sees its branches, and decides if it is open when the run ends. While a fork is
open, the parent is frozen: input goes to a branch (`>>label`), or continues a finished branch on
its tab. The coordinator runs the branches and has their states; the session has the transcripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from branching import __version__
from branching._caller import for_caller
from branching._threads import run_in_thread
from branching.agent.approvals import ApprovalRequest
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.fork_log import ForkLog
from branching.agent.protocols import Answer
from branching.agent.types import BranchSpec, ForkCostSummary, MergeResult, MergeStrategy
from branching.errors import BranchingError
from branching.tui.chat.command_parser import (
    HELP,
    NotUnderstood,
    Typed,
    is_allowed_while_forked,
    read,
)
from branching.tui.chat.conversation import Conversation
from branching.tui.chat.fork_registry import ForkRegistry
from branching.tui.chat.fork_settings import SETTLING, settle
from branching.tui.chat.merging import Merging
from branching.tui.chat.protocols import ChatAgent, Line, Wanted, Who
from branching.tui.chat.settings import SettingsFile
from branching.tui.chat.transcripts import OVERVIEW, Transcripts
from branching.tui.formatting import costs_text, failure, usage_text

Shell = Callable[[str, BranchRuntime | None], Awaitable[str]]
"""Runs a line in a branch, or where the parent works; returns what it printed."""


class ChatSession:
    """One chat."""

    def __init__(
        self,
        coordinator: ForkCoordinator,
        chat_agent: ChatAgent,
        *,
        settings: SettingsFile,
        shell: Shell,
        history: Any = None,
        log: ForkLog | None = None,
        kept: ForkRegistry | None = None,
    ) -> None:
        """Creates the session.

        `log` is the open run log, and `kept` the registry of saved forks; the session closes both.
        If the coordinator has an open fork, an earlier chat has left it, and `history` is its
        conversation.
        """
        self.coordinator = coordinator
        self.chat_agent = chat_agent
        self.tab = OVERVIEW
        """The open tab: a branch's id, or the overview."""
        self.said = Transcripts()
        self.conversation = Conversation(chat_agent, self.said, history, self._set_goal)
        """The parent's."""
        self.merging = Merging(coordinator, self._note_merge, self._adopt)
        self.settings = settings.load()
        self._file = settings
        self._shell = shell
        self._log = log
        self._kept = kept
        self._states: dict[str, str] = {}
        self._fork_id = self.coordinator.fork_id if self.is_forked else None
        """The fork whose beginning was noted."""
        self.adopted = False
        """Whether the agent made the open fork."""
        self._saving = asyncio.Lock()
        if settings.complaint:
            self.note(settings.complaint, "error")
        self._tell_what_was_left()

    # What there is.

    @property
    def is_forked(self) -> bool:
        """A fork is open."""
        return not self.coordinator.is_resolved

    @property
    def branches(self) -> list[BranchRuntime]:
        """Those of the open fork, in order."""
        return list(self.coordinator.branches.values()) if self.is_forked else []

    @property
    def badge(self) -> str:
        """`FORK: 2 · 1 …`: two branches, of which one still runs; "" without a fork."""
        if not self.is_forked:
            return ""
        running = sum(branch.is_running for branch in self.branches)
        return f"FORK: {len(self.branches)}" + (f" · {running} …" if running else "")

    def branch(self, branch_id: str) -> BranchRuntime | None:
        """Returns an open branch."""
        return next((branch for branch in self.branches if branch.id == branch_id), None)

    def next_tab(self, step: int = 1) -> None:
        """Goes to the next tab, around."""
        tabs = [OVERVIEW, *(branch.id for branch in self.branches)]
        here = tabs.index(self.tab) if self.tab in tabs else 0
        self.tab = tabs[(here + step) % len(tabs)]

    # What is heard.

    def note(self, text: str, who: Who = "note", tab: str | None = None) -> None:
        """Adds an entry to a transcript, by default that of the open tab."""
        if who in ("note", "error"):  # the words of this program, not of a person or a model
            text = for_caller(text)
        self.said.add(self.tab if tab is None else tab, Line(who, text))

    def _note_merge(self, text: str, who: Who) -> None:
        """Adds an entry to the overview, and to the branch's tab that is open."""
        for tab in dict.fromkeys((OVERVIEW, self.tab)):
            self.note(text, who, tab)

    def heard(self, tab: str, text: str) -> None:
        """Takes a piece of what an agent says."""
        if self._log is not None and tab != OVERVIEW:
            self._log.heard(tab, text)
        self.said.heard(tab, text)

    def heard_tool(self, tab: str, text: str) -> None:
        """Takes a call of a tool."""
        self.note(text, "tool", tab)

    def tick(self) -> None:
        """Notices what has happened to branches since the last time."""
        self._notice_fork()
        if self._log is not None:
            self._log.notice()
        for branch in self.branches:
            state = branch.status.state
            if self._states.get(branch.id) == state:
                continue
            self._states[branch.id] = state
            if state == "running":
                continue
            self.said.flush(branch.id)
            said = any(line.who == "agent" for line in self.said.lines(branch.id))
            if branch.final_message and not said:
                self.heard(branch.id, branch.final_message + "\n")
            error = f": {branch.status.error}" if branch.status.error else ""
            self.note(f"{branch.spec.label} is {state}{error}", "note", branch.id)

    def _notice_fork(self) -> None:
        """Notes that the agent has forked, or has ended its fork."""
        fork_id = self.coordinator.fork_id if self.is_forked else None
        if fork_id == self._fork_id:
            return
        ended, self._fork_id = self._fork_id, fork_id
        if ended is not None and self.adopted and self.conversation.is_in_flight:
            self.note("The agent has ended its fork.", tab=OVERVIEW)
        self.adopted = fork_id is not None
        if fork_id is not None:
            self.coordinator.goal = self.conversation.prompt
            self._note_fork("The agent forked")

    def _note_fork(self, what: str) -> None:
        self._states = {}
        for branch in self.branches:
            self.note(branch.spec.steer, "you", branch.id)
        labels = ", ".join(branch.spec.label for branch in self.branches)
        self.note(f"{what}: {labels}. Tab switches between them; /merge ends it.", tab=OVERVIEW)

    # What is typed.

    async def submit(self, text: str) -> Wanted | None:
        """Handles a line of input. Returns the action for the front end.

        Refusals are added to the transcript. For a prompt it returns when the run has ended.
        """
        if not text.strip():
            return None
        try:
            typed = read(text, [(branch.id, branch.spec.label) for branch in self.branches])
            if self.is_forked and typed.kind == "command" and not is_allowed_while_forked(typed):
                raise NotUnderstood(f"{typed.text} has to wait: a fork is open; /merge ends it")
            return await self._carry_out(typed)
        except NotUnderstood as error:
            self.note(str(error), "error")
        except (BranchingError, OSError, ValueError) as error:
            self.note(failure(error), "error")
        return None

    async def _carry_out(self, typed: Typed) -> Wanted | None:
        if typed.kind == "steer":
            self._check_hears(typed.text)
            self.coordinator.steer(typed.text, typed.rest)
            self.note(typed.rest, "you", typed.text)
            branch = self.branch(typed.text)
            if self.tab != typed.text and branch is not None:
                self.note(f"sent to {branch.spec.label}: {typed.rest}")
            return None
        if typed.kind == "shell":
            branch = self.branch(self.tab)
            self.note(f"!{typed.text}", "you")
            tab = self.tab
            self.note((await self._shell(typed.text, branch)).rstrip("\n"), "shell", tab)
            return None
        if typed.kind == "prompt":
            await self._prompt(typed.text)
            return None
        return await self._command(typed.text, typed.rest)

    def _check_hears(self, branch_id: str) -> None:
        branch = self.branch(branch_id)
        if branch is not None and not branch.is_running:
            label, state = branch.spec.label, branch.status.state
            hint = "; you can continue it on its tab" if state == "done" else ""
            raise NotUnderstood(f"{label} is {state} and cannot receive messages{hint}")

    async def _prompt(self, text: str) -> None:
        if self.is_forked:
            branch = self.branch(self.tab)
            if branch is None:
                raise NotUnderstood("a fork is open: >>label sends a message to a branch")
            if branch.status.state != "done":
                raise NotUnderstood(
                    f"{branch.spec.label} is {branch.status.state}: only a branch that is done "
                    f"can continue; >>{branch.spec.label} sends a message to one that runs"
                )
            self.note(text, "you")
            await self.coordinator.run_on_branch(branch.id, text)
            return
        if self.conversation.is_in_flight:
            raise NotUnderstood("a run is in progress; Escape stops it")
        await self.conversation.say(text)

    async def _command(self, command: str, rest: str) -> Wanted | None:
        if command in SETTLING:
            await self._settle(command, rest)
            return None
        if command == "/fork" and not rest:
            self._check_idle()
            return Wanted(kind="fork")
        if command == "/fork" and (rest == "diff" or rest.startswith("diff ")):
            if not self.is_forked:
                raise NotUnderstood("there is no fork to compare; /fork starts one")
            return Wanted(kind="diff", text=rest[len("diff") :].strip())
        if command == "/merge":
            if self.is_forked and self.conversation.is_in_flight:
                raise NotUnderstood(
                    "the agent is running, and may end its fork itself; Escape stops it"
                )
            return await self.merging.begin()
        if command == "/override" and rest:
            await self.merging.override(rest)
            return None
        if command == "/copy":
            said = [line.text for line in self.said.lines(self.tab) if line.who == "agent"]
            if not said:
                raise NotUnderstood("there is nothing to copy")
            return Wanted(kind="copy", text="\n".join(said))
        if command == "/quit":
            return Wanted(kind="quit")
        if command in ("/help", "/version"):
            self.note(HELP if command == "/help" else f"branching {__version__}")
            return None
        if command in ("/cost", "/tokens"):
            self.note(self._costs(costs_text if command == "/cost" else usage_text))
            return None
        raise NotUnderstood(f"{command} {rest}".rstrip() + " is not a command; /help lists them")

    async def _settle(self, command: str, rest: str) -> None:
        settled, said = settle(command, rest, self.settings, self.coordinator.max_branches)
        if settled != self.settings:
            self.settings = settled
            try:
                async with self._saving:  # the newest is what stays
                    await run_in_thread(lambda: self._file.save(self.settings))
            except OSError as error:
                said += f" (for this chat only: {error})"
        self.note(said)

    def _costs(self, say: Callable[[ForkCostSummary], str]) -> str:
        if self.coordinator.fork_id is None:
            return "nothing was forked yet"
        return say(self.coordinator.fork_cost())

    # Forking and merging.

    def _check_idle(self) -> None:
        if self.is_forked:
            where = "from a branch" if self.tab else "while a fork is open"
            raise NotUnderstood(f"cannot fork {where}: /merge it first")
        if self.conversation.is_in_flight:
            raise NotUnderstood("a run is in progress; fork when it has ended")

    async def fork(self, specs: Sequence[BranchSpec], aggregate_usd: float | None = None) -> bool:
        """Forks the conversation; False if it could not be done, which is noted."""
        try:
            self._check_idle()
            await self.coordinator.fork(
                specs,
                parent_history=self.conversation.history,
                strategy=MergeStrategy(kind=self.settings.strategy),
                aggregate_budget_usd=aggregate_usd,
            )
        except Exception as error:  # limits are plain Exceptions; whatever it is, nothing was made
            self.note(f"nothing was forked: {failure(error)}", "error", OVERVIEW)
            return False
        self._fork_id, self.adopted = self.coordinator.fork_id, False
        self._note_fork("Forked")
        return True

    def _tell_what_was_left(self) -> None:
        """Says in what state an earlier chat has left its fork."""
        if not self.is_forked:
            if (merged := self.coordinator.last_merge) is not None:
                self.note(f"An earlier chat had begun to merge: {merged.notice}")
            return
        for branch in self.branches:
            self.note(branch.spec.steer, "you", branch.id)
            if branch.status.last_message_preview:
                self.heard(branch.id, f"{branch.status.last_message_preview}\n")
        labels = ", ".join(branch.spec.label for branch in self.branches)
        self.note(
            f"The fork of an earlier chat is open still: {labels}. Tab switches between them; "
            "/merge ends it, Escape drops it."
        )

    def _adopt(self, result: MergeResult) -> None:
        self.conversation.history = result.history_after_merge
        self.tab = OVERVIEW

    def _set_goal(self, text: str) -> None:
        self.coordinator.goal = text

    # Stopping.

    def what_escape_stops(self) -> str:
        """The question that Escape raises on the open tab; "" if nothing runs there."""
        branch = self.branch(self.tab)
        if branch is not None:
            label = branch.spec.label
            return f"Terminate branch {label!r}?" if branch.is_running else ""
        if self.conversation.is_in_flight:
            return "Stop the run?"
        if self.is_forked:
            return f"Abort the fork, with all its {len(self.branches)} branches?"
        return ""

    async def stop(self) -> None:
        """Stops what Escape stops on the open tab."""
        branch = self.branch(self.tab)
        try:
            if branch is not None:
                await self.coordinator.terminate_branch(branch.id)
            elif self.conversation.is_in_flight:
                self.conversation.stop()
            elif self.is_forked:
                await self.coordinator.abort_fork()
                self.tab = OVERVIEW
                self.note("Aborted: no branch was kept", tab=OVERVIEW)
        except (BranchingError, OSError) as error:
            self.note(failure(error), "error")

    @property
    def can_be_left(self) -> bool:
        """Leaves an open fork for the next chat."""
        return self._kept is not None and self._kept.outlives_us

    async def close(self, *, leaves: bool = False) -> None:
        """Ends the chat: what runs is stopped, an open fork dropped, or left for the next chat."""
        await self.conversation.close()
        try:
            if leaves and self.can_be_left:
                await self.coordinator.detach()
            else:
                await self.coordinator.aclose()
        finally:
            if self._log is not None:
                self._log.notice()
                self._log.__exit__(None, None, None)
                self._log = None
            if self._kept is not None:
                self._kept.close()
                self._kept = None

    # Approvals.

    def approvals(self) -> list[tuple[str, str, ApprovalRequest]]:
        """Returns the open approval requests: tab, name of the requester, request."""
        own = [
            (OVERVIEW, "the agent", request) for request in self.conversation.approvals.pending()
        ]
        labels = {branch.id: branch.spec.label for branch in self.branches}
        theirs = self.coordinator.iter_pending_approvals() if self.is_forked else []
        return own + [(branch_id, labels[branch_id], request) for branch_id, request in theirs]

    def answer(self, tab: str, request: ApprovalRequest, answer: Answer) -> None:
        """Answers a request. One that is no longer open is ignored."""
        try:
            if tab == OVERVIEW:
                self.conversation.approvals.answer(request, answer)
            else:
                self.coordinator.answer(tab, request, answer)
        except ValueError:
            return
        self.note(f"{'approved' if answer == 'approve' else 'denied'}: {request}", tab=tab)
