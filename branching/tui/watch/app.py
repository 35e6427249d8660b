"""`branching watch`: one screen with all branches of a workspace.

    line 1      the workspace, the number of branches, errors
    table       a line for each branch, the candidates of a call below the call's name
    below       the output of the selected branch, or its changed files
    last lines  the last action, for a while, and the available keys

The screen is rendered from one `Snapshot` at a time. Actions run in the background, and the next
snapshot shows their result. Each kind of action has its own thread, so a slow commit blocks neither
a diff nor the screen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.timer import Timer
from textual.widgets import ContentSwitcher, OptionList, Static

from branching._caller import for_caller
from branching._threads import WAITING_MAX, QueueThread
from branching.errors import BranchingError, ConflictError
from branching.fs import Workspace
from branching.tui.actions import BranchActions
from branching.tui.dialogs import Line, Question
from branching.tui.diff.diff_screen import DiffScreen, DiffSource
from branching.tui.diff.diff_sources import pair
from branching.tui.formatting import failure, letter, plain
from branching.tui.key_bar import KeyBar
from branching.tui.terminal import TerminalDriver, leave_on_signals
from branching.tui.watch.widgets import BranchTable, Facts, FileList, Printed
from branching.tui.watch.workspace_monitor import BranchView, Output, Snapshot, WorkspaceMonitor

SHORT_LINES = 16
"""Below this the facts about the chosen branch are left out."""
SAID_SECONDS = 10
"""After so long a message goes."""

_HELP = """\
up, down, tab, 1-9   choose a branch
o   show what it prints
f   list the files it changed
d   side by side: with its parent, or with the marked branch;
    of a branch that is gone or stale: its patch
m   mark it, to compare others with it
s   send a message to what runs in it (BRANCHING_STEER)
p   pause what runs in it, and resume
x   stop what runs in it
k   keep it when its call ends
c   commit it to its parent
a   abort it: delete it with its changes
r   rebase it, if it is stale
u   undo the last commit
q   quit; running commands continue"""


class Watch(App[None]):
    """The application. It neither opens nor closes the workspace."""

    TITLE = "branching watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #top { height: 1; text-style: reverse; text-wrap: nowrap; text-overflow: ellipsis; }
    #table { height: auto; max-height: 50%; padding: 0; }
    #table, #table:focus { border: none; }
    #table > .option-list--option-disabled { color: ansi_default; }
    /* An OptionList takes no reverse style for a row: the text of the chosen row has it. */
    #table > .option-list--option-highlighted, #table:focus > .option-list--option-highlighted {
        color: ansi_default; background: ansi_default; text-style: none;
    }
    #facts { height: auto; max-height: 4; border-top: solid $foreground; }
    #facts { text-wrap: nowrap; text-overflow: ellipsis; }
    #views { height: 1fr; min-height: 2; border-top: solid $foreground; }
    #output { height: 1fr; }
    #files { height: 1fr; padding: 0; }
    #files, #files:focus { border: none; }
    #files > .option-list--option-highlighted { text-style: reverse; }
    #said { height: auto; max-height: 3; text-style: bold; }
    .-short #facts { display: none; }
    .-short #table { max-height: 4; }
    .-short #said { max-height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    """
    VERTICAL_BREAKPOINTS = [  # noqa: RUF012  (Textual declares no class variable)
        (0, "-short"),
        (SHORT_LINES, "-tall"),
    ]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "choose(1)", "next", priority=True, show=False),
        Binding("shift+tab", "choose(-1)", "previous", priority=True, show=False),
        Binding("o", "view('output')", "output", show=False),
        Binding("f", "view('files')", "files"),
        Binding("d", "compare", "diff"),
        Binding("m", "mark", "mark", show=False),
        Binding("s", "steer", "say"),
        Binding("p", "pause", "pause"),
        Binding("x", "stop", "stop"),
        Binding("k", "keep", "keep"),
        Binding("c", "commit", "commit"),
        Binding("a", "abort", "abort"),
        Binding("r", "rebase", "rebase"),
        Binding("u", "undo", "undo"),
        Binding("question_mark", "help", "keys", key_display="?"),
        Binding("q", "quit", "quit"),
        *(Binding(str(n), f"number({n})", show=False) for n in range(1, 10)),
    ]

    class Looked(Message):
        """The observer has looked."""

        def __init__(self, look: Snapshot) -> None:
            super().__init__()
            self.look = look

    class Said(Message):
        """The chosen branch has printed something, or was just chosen."""

        def __init__(self, output: Output) -> None:
            super().__init__()
            self.output = output

    def __init__(self, space: Workspace) -> None:
        # The terminal's own colours; none with NO_COLOR.
        super().__init__(driver_class=TerminalDriver, ansi_color=True)
        self._space = space
        self._actions = BranchActions(space)
        self._doing = QueueThread("deeds", WAITING_MAX)
        self._reading = QueueThread("reading", WAITING_MAX)
        self._observer = WorkspaceMonitor(
            space,
            lambda look: self.post_message(self.Looked(look)),
            lambda output: self.post_message(self.Said(output)),
        )
        # Held, not looked up: a look may still arrive while the screen is taken down.
        self._top = Static(id="top")
        self._table = BranchTable(id="table")
        self._facts = Facts(id="facts")
        self._views = ContentSwitcher(id="views", initial="output")
        self._output = Printed("output")
        self._files = FileList("files")
        self._said = Static(id="said")
        self._keys = KeyBar(id="keys")
        self._forget: Timer | None = None
        self._snapshot = Snapshot()
        self._chosen = ""
        self._marked = ""

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._table
        yield self._facts
        with self._views:
            yield self._output
            yield self._files
        yield self._said
        yield self._keys

    def on_mount(self) -> None:
        self._table.focus()
        self._draw_top()
        leave_on_signals(lambda code: self.exit(return_code=code))
        self._observer.start()

    def on_unmount(self) -> None:
        self._observer.close()

    # What is seen.

    def on_watch_looked(self, message: Looked) -> None:
        self._snapshot = message.look
        self._draw()

    def on_watch_said(self, message: Said) -> None:
        if message.output.name == self._chosen:
            self._output.show(message.output)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_list is self._table and event.option.id is not None:
            self._choose(event.option.id)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option_list is self._table:
            self.action_compare()
        elif path := self._files.path(event.option_index):
            self._compare(path)

    def _draw(self) -> None:
        views = self._snapshot.views
        if views and self._snapshot.find(self._chosen) is None:
            running = [view for view in views if view.is_running]
            self._choose((running or views)[0].name)
        self._draw_top()
        names = [view.name for view in views]
        chosen = names.index(self._chosen) if self._chosen in names else 0
        self._table.show(views, chosen, self._marked)
        view = self._snapshot.find(self._chosen)
        self._facts.show(view)
        self._keys.show(self._applicable(view))

    def _applicable(self, view: BranchView | None) -> list[tuple[str, str]]:
        """Lists the keys that do something now, those for help and leaving first."""
        keys = [("?", "keys"), ("q", "quit")]
        if view is not None:
            is_open = view.record is not None and view.state != "stale"
            if view.record is not None or view.has_patch:
                keys.append(("d", "diff"))
            if self._views.current == "files":
                keys.append(("o", "output"))
            elif view.record is not None or view.has_patch:
                keys.append(("f", "files"))
            if view.is_running:
                keys.append(("s", "say"))
                keys.append(("p", "resume" if view.state == "paused" else "pause"))
                keys.append(("x", "stop"))
                keys.append(("k", "keep"))
            elif is_open:
                keys.append(("c", "commit"))
            elif view.record is not None:
                keys.append(("r", "rebase"))
            if view.record is not None:
                keys.append(("a", "abort"))
        if self._snapshot.commits:
            keys.append(("u", "undo"))
        return keys

    def _draw_top(self) -> None:
        look = self._snapshot
        running = sum(view.is_running for view in look.views)
        open_ones = sum(view.record is not None for view in look.views)
        facts = [f"{open_ones} open", f"{running} running", self._space.policy]
        if look.commits:
            facts.append(f"{look.commits} to undo")
        facts.append(for_caller(str(self._space.base)))
        text = look.error and for_caller(f"the branches cannot be read: {look.error}")
        self._top.update(Text(text or " branching watch · " + " · ".join(facts), no_wrap=True))

    # What is chosen.

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disables the keys for moving between branches while a dialog is open."""
        del parameters
        return action not in ("choose", "number") or len(self.screen_stack) == 1

    def _choose(self, name: str) -> None:
        if name != self._chosen:
            self._chosen = name
            self._output.clear()
            self._observer.choose(name)
            self._draw()
            if self._views.current == "files":
                self._list_files()

    def _view(self) -> BranchView | None:
        view = self._snapshot.find(self._chosen)
        if view is None:
            self._say("no branch is chosen")
        return view

    def _steered_sight(self) -> BranchView | None:
        """Returns the chosen branch, if what runs there can be steered; else says why not."""
        view = self._view()
        try:
            if view is not None:
                self._actions.check_steered(view)
        except BranchingError as error:
            self._say(failure(error))
            return None
        return view

    def action_choose(self, step: int) -> None:
        names = [view.name for view in self._snapshot.views]
        if names:
            here = names.index(self._chosen) if self._chosen in names else 0
            self._choose(names[(here + step) % len(names)])

    def action_number(self, number: int) -> None:
        if number <= len(self._snapshot.views):
            self._choose(self._snapshot.views[number - 1].name)

    def action_view(self, name: str) -> None:
        self._views.current = name
        (self._files if name == "files" else self._table).focus()
        self._draw()
        if name == "files":
            self._list_files()

    def action_mark(self) -> None:
        self._marked = "" if self._marked == self._chosen else self._chosen
        said = (
            f"{self._marked} is marked: d on another compares them" if self._marked else "unmarked"
        )
        self._say(said)
        self._draw()

    def action_help(self) -> None:
        self.push_screen(Question("Keys", _HELP.splitlines(), []))

    # What is done.

    def _say(self, text: str) -> None:
        self._said.update(Text(plain(for_caller(text))))
        self._said.display = bool(text)
        if self._forget is not None:
            self._forget.stop()
        self._forget = self.set_timer(SAID_SECONDS, lambda: self._say("")) if text else None

    async def _do(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs an action. On failure, shows the error and returns None."""
        try:
            return await self._doing.do(function, *args, **options)
        except (BranchingError, OSError, RuntimeError) as error:
            self._say(failure(error))
            return None
        finally:
            self._observer.look_now()

    async def _do_and_say(self, function: Callable[..., str], *args: Any, **options: Any) -> None:
        said = await self._do(function, *args, **options)
        if said is not None:
            self._say(said)

    @work(group="files", exclusive=True)
    async def _list_files(self) -> None:
        self._files.clear()
        view = self._view()
        if view is None:
            return
        try:
            self._files.show(await self._reading.do(self._actions.changes, view))
        except (BranchingError, OSError, RuntimeError) as error:
            self._say(failure(error))

    @work
    async def action_compare(self) -> None:
        await self._open_comparison(None)

    @work
    async def _compare(self, path: str) -> None:
        await self._open_comparison(path)

    async def _open_comparison(self, path: str | None) -> None:
        view = self._view()
        if view is None:
            return
        other = self._snapshot.find(self._marked) if self._marked != view.name else None
        try:
            found: DiffSource
            if view.is_shown_by_patch:
                found = await self._reading.do(self._actions.patch, view)
            else:
                found = await self._reading.do(pair, self._space, view, other)
        except (BranchingError, OSError, RuntimeError) as error:
            self._say(failure(error))
            return
        self.push_screen(DiffScreen(found, self._reading, path))

    @work
    async def action_steer(self) -> None:
        view = self._steered_sight()
        if view is None:
            return
        text = await self.push_screen_wait(Line(f"message to {view.name}:"))
        if text:
            await self._do_and_say(self._actions.tell, view, text)

    @work
    async def action_pause(self) -> None:
        if view := self._view():
            await self._do_and_say(self._actions.pause, view)

    @work
    async def action_keep(self) -> None:
        if view := self._view():
            await self._do_and_say(self._actions.keep, view)

    @work
    async def action_rebase(self) -> None:
        if view := self._view():
            await self._do_and_say(self._actions.rebase, view)

    @work
    async def action_stop(self) -> None:
        view = self._steered_sight()
        if view is None:
            return
        lines = [
            plain(view.label),
            "Its call continues without it and drops its branch at the end.",
        ]
        question = Question(f"Stop what runs in {view.name}?", lines, [("y", "stop it")])
        if await self.push_screen_wait(question):
            await self._do_and_say(self._actions.stop, view)

    @work
    async def action_abort(self) -> None:
        view = self._view()
        if view is None:
            return
        lines = [
            f"{view.changes or 'unknown'} changes are deleted with it, and the branches inside it."
        ]
        question = Question(f"Drop {view.name}?", lines, [("y", "drop it")])
        if await self.push_screen_wait(question):
            await self._do_and_say(self._actions.abort, view)

    @work
    async def action_commit(self) -> None:
        view = self._view()
        if view is None:
            return
        answers = [("y", "commit")]
        try:
            changes = await self._doing.do(self._actions.preview, view)
            lines = [f"{letter(change.change)} {change.path}" for change in changes] or [
                "no changes"
            ]
        except ConflictError as error:
            if not error.paths:
                self._say(failure(error))
                return
            lines = ["The same paths were changed in the workspace:", *error.paths]
            answers = [("f", "force: the branch's side"), ("s", "skip: theirs")]
        except (BranchingError, OSError, RuntimeError) as error:
            self._say(failure(error))
            return
        if stale := self._becoming_stale(view):
            lines.append(
                f"Afterwards these are stale until they are rebased (r): {', '.join(stale)}"
            )
        answer = await self.push_screen_wait(Question(f"Commit {view.name}?", lines, answers))
        if answer:
            force, skip = answer == "f", answer == "s"
            await self._do_and_say(self._actions.commit, view, force=force, skip=skip)

    def _becoming_stale(self, view: BranchView) -> list[str]:
        """Lists the branches that a commit of this one makes stale."""
        if self._space.policy != "first-winner" or view.record is None:
            return []
        parent = view.record.parent
        return [
            other.name
            for other in self._snapshot.views
            if other.name != view.name
            and other.record is not None
            and other.record.parent == parent
            and other.state != "stale"
        ]

    @work
    async def action_undo(self) -> None:
        try:
            reversal = await self._doing.do(self._actions.undo, dry_run=True)
            lines = [f"{letter(change.change)} {change.path}" for change in reversal.changes]
            answers = [("y", "undo it")]
            name = reversal.commit.branch
        except (BranchingError, OSError, RuntimeError) as error:
            self._say(failure(error))
            return
        question = Question(f"Undo the commit of {name}? It will change:", lines, answers)
        if await self.push_screen_wait(question):
            done = await self._do(self._actions.undo)
            if done is not None:
                self._say(f"the commit of {done.commit.branch} is undone")
