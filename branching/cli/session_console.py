"""The prompt of `branching session`: Python code, and commands that begin with %.

Code runs in the session, or in one of its children after `%fork`. Lines are edited, completed and
remembered by `readline`, and put together to statements by `code.InteractiveConsole`: both are in
Python's standard library and behave as its own prompt.

A signal must not interrupt a fork or a commit, nor the exchange of messages with an interpreter.
So it is raised here only while the prompt waits for a line. At other times an interrupt is passed
to the code that runs, and other signals end the prompt when it comes back.
"""

from __future__ import annotations

import code
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType

from branching._caller import for_caller
from branching.cli.error_handling import Interrupted, note
from branching.cli.session_commands import CommandError, SessionCommands
from branching.cli.signals import STOP_SIGNALS
from branching.errors import BranchingError, MemoryBranchError
from branching.session import Cell, Session, completion

HISTORY_LINES_MAX = 10_000
_WORD_ENDS = " \t\n`!@#$^&*()-=+[{]}\\|;:'\",<>/?"
"""Characters between the words that are completed. The dot and % belong to a word."""

HELP = """\
%fork N        make N children, each with the variables, open files and files of the session
%child K       run code in child K from now on
%children      list the children
%all CODE      run one line in all children
%pick [K]      child K, or the one you are in, becomes the session; its files are the session's
%back          drop all children, and go on as before the fork
%diff          list the files that the session, or the child, has changed
%commit        commit the session's files to the workspace
%abort         drop the session's files, and leave
%help          show this text
Ctrl-C interrupts the code. Ctrl-D leaves, and keeps the session's files in a branch."""


class Console(code.InteractiveConsole):
    """Reads code and commands, and runs them in a session."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._live = SessionCommands(session)
        self._is_at_prompt = False
        self._received: int | None = None
        self.is_aborted = False
        """Whether the user dropped the session's files."""
        self._commands: dict[str, Callable[[str], None]] = {
            "all": self._run_in_all,
            "abort": self._abort,
            "help": lambda _: print(HELP),
            **{name: partial(self._say, name) for name in self._live.table},
        }

    def use(self) -> None:
        """Serves the prompt until the user leaves it.

        Raises:
            Interrupted: A signal ended it.
        """
        with self._signals(), _history(self._complete):
            with suppress(SystemExit):
                self.interact(f"Python {sys.version.split()[0]}. %help lists the commands.", "")
            if self._received is not None:
                raise Interrupted(self._received)

    # What the base class calls.

    def raw_input(self, prompt: str = "") -> str:  # noqa: ARG002  (it says where code runs)
        """Returns a line. EOFError at its end."""
        if self._received is not None:
            raise Interrupted(self._received)
        child = self._live.child
        head = "" if child is None else f"{child.index}"
        self._is_at_prompt = True
        try:
            return input(f"{head}{'... ' if self.buffer else '>>> '}")
        finally:
            self._is_at_prompt = False

    def runsource(self, source: str, filename: str = "<input>", symbol: str = "single") -> bool:
        """Runs a command or a whole statement; returns True if the statement has no end yet."""
        name, _, argument = source.strip().partition(" ")
        if name.startswith("%"):
            self._run_command(name[1:], argument.strip())
            return False
        try:
            is_whole = self.compile(source, filename, symbol) is not None
        except (OverflowError, SyntaxError, ValueError):
            is_whole = True  # the interpreter of the session says what is wrong
        if is_whole and source.strip():
            with self._errors():
                self._show(self._live.place.run(source))
        return not is_whole

    # Code.

    def _show(self, cell: Cell) -> None:
        if isinstance(cell.exception, SystemExit):
            raise SystemExit
        if cell.exception is not None:
            print(str(cell.exception.__cause__ or cell.exception).strip(), file=sys.stderr)
        elif cell.text:
            print(cell.text)

    def _complete(self, word: str, index: int) -> str | None:
        if index == 0:
            if word.startswith("%"):
                self._found = [f"%{name}" for name in self._commands if name.startswith(word[1:])]
            else:
                self._found = self._completed(word)
        return self._found[index] if index < len(self._found) else None

    def _completed(self, word: str) -> list[str]:
        if not word:
            return ["    "]
        try:
            found = self._live.place.run(completion.names, word, timeout=completion.SECONDS_MAX)
        except (BranchingError, TimeoutError):
            return []  # what is wrong is said where code is run
        return found.value if isinstance(found.value, list) else []

    # Commands.

    def _run_command(self, name: str, argument: str) -> None:
        with self._errors():
            if name not in self._commands:
                raise CommandError(f"there is no command %{name}; %help lists them")
            self._commands[name](argument)

    def _say(self, name: str, argument: str) -> None:
        if text := self._live.table[name](argument):
            print(text)

    def _run_in_all(self, argument: str) -> None:
        if not argument:
            raise CommandError("%all needs code: %all score = test(model)")
        for child in self._live.session.children or [self._live.named("")]:
            print(f"child {child.index}:", flush=True)
            self._show(child.run(argument))

    def _abort(self, _: str) -> None:
        self.is_aborted = True
        raise SystemExit

    # Errors and signals.

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except CommandError as error:
            print(error, file=sys.stderr)
        except BranchingError as error:
            lines = [f"error: {error.message}", *(f"  {path}" for path in error.paths)]
            lines += [f"Hint: {error.hint}"] if error.hint else []
            print(for_caller("\n".join(lines)), file=sys.stderr)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._is_at_prompt:
            raise KeyboardInterrupt if number == signal.SIGINT else Interrupted(number)
        if number != signal.SIGINT:
            self._received = number
        with suppress(MemoryBranchError):  # it has ended
            self._live.place.interrupt()


@contextmanager
def _history(complete: Callable[[str, int], str | None]) -> Iterator[None]:
    """Sets up `readline`, which keeps the lines of earlier sessions in a file."""
    try:
        import readline
    except ImportError:  # a Python that was built without it
        note("this Python has no readline: lines are not completed or remembered")
        yield
        return
    file = _history_file()
    try:
        readline.read_history_file(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        note(f"the history was not read: {error}")
    readline.set_history_length(HISTORY_LINES_MAX)
    readline.set_completer_delims(_WORD_ENDS)
    readline.set_completer(complete)
    readline.parse_and_bind(_completion_key(readline))
    try:
        yield
    finally:
        readline.set_completer(None)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(file)
        except OSError as error:
            note(f"the history was not written: {error}")


def _completion_key(readline: ModuleType) -> str:
    is_libedit = "libedit" in (readline.__doc__ or "")
    return "bind ^I rl_complete" if is_libedit else "tab: complete"


def _history_file() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    return state / "branching" / "session_history"
