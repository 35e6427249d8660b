"""Commands as candidates and callbacks.

A Program is called with a branch's directory like any candidate. It runs its command there, reports
the output line by line, and returns the exit code and the score that the command wrote to
descriptor 3. Unlike a function, it can be stopped.

The command's environment describes the branch:

    BRANCHING=1             it runs in a branch
    BRANCHING_BRANCH        name of the branch
    BRANCHING_WORKSPACE     root of the workspace
    BRANCHING_ATTEMPT       number of the candidate or attempt, from 0; empty for a setup
    BRANCHING_FEEDBACK      feedback on earlier attempts (empty in the first)
    BRANCHING_STEER         the message file, with one message per line; only if a
                            `run_controller` accepts messages
    BRANCHING_PORT_BASE     first of ten ports that no other branch uses at the same time
    TMPDIR                  a directory for temporary files, removed when the command ends
"""

from __future__ import annotations

import codecs
import copy
import math
import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branching.errors import BranchingError, ProcessBranchError
from branching.fs import Branch
from branching.patterns.attempt import Task
from branching.patterns.results import CandidateResult
from branching.process import (
    OWN_TMP,
    Command,
    Ended,
    Isolation,
    Owner,
    Sandbox,
    Sink,
    validate_isolation,
)
from branching.process.bounded_output import OutputTail
from branching.process.environment import inherited_environment, scratch_directory
from branching.process.port_ranges import reserve_ports
from branching.runlog.events import SETUP_INDEX
from branching.runlog.run_controller import RunController

if TYPE_CHECKING:
    from branching.process import CallLimits
    from branching.process.pty_proxy import PtyProxy

FEEDBACK_BYTES_MAX = 100_000
"""Maximum size of the feedback. The kernel refuses a variable of 128 KiB. The end of longer
feedback is kept, because compilers and test runners print their summary last."""
EXPLAINED_LINES_MAX = 40
"""Number of output lines of a failure that the next attempt receives."""
ANSWER_BYTES_MAX = 8 << 20
"""Maximum output of a callback, which is held in memory."""
LINE_CHARACTERS_MAX = 64 << 10
"""Longer lines are passed on in pieces, so that output without newlines needs bounded memory."""
_LAST_OUTPUT = threading.local()
"""`lines`: the output of the FeedbackCandidate that runs in this thread. The candidate itself has
no state: it runs in several branches concurrently, and is pickled for a cluster."""
_RETURNS = r"\r+(?=\n|\Z)"
"""Carriage returns at the ends of lines."""


class BranchCommand:
    """A command that runs in a branch. Subclasses interpret its end.

    `hide` lists glob patterns of files that it cannot read. `network=False` leaves only the
    loopback interface. `clean_env` gives it an environment without keys and tokens, to which `env`
    adds. `port_base` is the first of ten ports that the caller has reserved (`reserve_ports`).
    `caches` are directories outside of the branch that it can write, in a sandbox only. It starts
    in `directory`, a path relative to the branch.
    """

    ends_when_cancelled = True

    def __init__(
        self,
        argv: Sequence[str],
        *,
        workspace: Path,
        owner: Owner | None,
        stdout: Sink = None,
        stderr: Sink = None,
        tells_output: bool = True,
        inherit_stdin: bool = False,
        terminal: PtyProxy | None = None,
        on_readable: Mapping[int, Callable[[], None]] | None = None,
        score: bool = False,
        label: str | None = None,
        isolation: Isolation = "sandbox",
        hide: Sequence[str] = (),
        network: bool = True,
        clean_env: bool = False,
        env: Mapping[str, str] | None = None,
        port_base: int | None = None,
        caches: Sequence[Path] = (),
        directory: str | None = None,
    ) -> None:
        validate_isolation(isolation, network=network, hide=hide)
        self._hide = tuple(hide)
        self._network = network
        self._clean_env = clean_env
        self._env = dict(env or {})
        self._port_base = port_base
        self._caches = tuple(caches)
        self._directory = directory
        self._isolation = isolation
        self.label = shlex.join(argv) if label is None else label
        self._argv = argv
        self._workspace = workspace
        self._owner = owner
        self._stdout = stdout
        self._stderr = stderr
        self._tells_output = tells_output
        self._inherit_stdin = inherit_stdin
        self._terminal = terminal
        self._on_readable = on_readable
        self._score = score

    @property
    def hide(self) -> tuple[str, ...]:
        """Glob patterns of the files that it cannot read."""
        return self._hide

    def placed(self, workspace: Path, owner: Owner | None) -> BranchCommand:
        """Returns the same command for a workspace on another machine."""
        placed = copy.copy(self)
        placed._workspace, placed._owner = workspace, owner
        return placed

    def _run(
        self,
        path: Path,
        stdout: Sink,
        stderr: Sink,
        environment: Mapping[str, str] | None = None,
        beside: Sequence[tuple[Path, Path]] = (),
    ) -> Ended:
        if self._directory is not None and not (path / self._directory).is_dir():
            raise ProcessBranchError(
                f"the directory {self._directory!r} does not exist in the branch; nothing ran",
                hint="start from the root of the workspace",
            )
        task = Task.of_caller()
        lines = None
        if task is not None and self._tells_output:
            lines = BlockSplitter(partial(self._say, task))
        teller = None if lines is None else lines.feed
        with ExitStack() as stack:
            port_base = self._port_base or stack.enter_context(reserve_ports())
            scratch = OWN_TMP
            controller = None if self._inherit_stdin else RunController.current()
            words, steer = None, {}
            if controller is not None and task is not None:
                words = stack.enter_context(controller.steer_file(task.attempt.branch.name))
            if words is not None:
                seen = words
                if self._isolation != "none":
                    seen = OWN_TMP / "branching-steer" / words.name
                    beside = [*beside, (words.parent, seen.parent)]
                steer = {"BRANCHING_STEER": str(seen)}
            sandbox = self._sandbox(path, beside)
            if sandbox is None:
                scratch = stack.enter_context(scratch_directory(self._owner))
            limits = {} if task is None else _limits_of(task, stack)
            command = Command(
                self._argv,
                cwd=path if self._directory is None else path / self._directory,
                sandbox=sandbox,
                environment={
                    **inherited_environment(is_clean=self._clean_env),
                    **self._env,
                    **self._environment(task),
                    **(environment or {}),
                    **steer,
                    "BRANCHING_PORT_BASE": str(port_base),
                    "TMPDIR": str(scratch),
                },
                owner=self._owner,
                stdout=teller if stdout is None else stdout,
                stderr=teller if stderr is None else stderr,
                inherit_stdin=self._inherit_stdin,
                terminal=self._terminal,
                deadline=math.inf if task is None else task.deadline,
                on_readable=self._on_readable,
                score=self._score,
                **limits,
            )
            if task is not None:
                task.on_cancel(command.kill)
                if controller is not None:
                    name = task.attempt.branch.name
                    stack.enter_context(controller.controlling(name, command, words))
            try:
                ended = command.run()
                if task is not None:
                    task.ended = ended
                return ended
            finally:
                if lines is not None:
                    lines.finish()
                if task is not None:
                    task.forget(command.kill)

    def _sandbox(self, path: Path, beside: Sequence[tuple[Path, Path]]) -> Sandbox | None:
        if self._isolation == "none":
            return None
        return Sandbox.of(
            path,
            at=self._workspace,
            hide=self._hide,
            network=self._network,
            home=Owner.home_of(self._owner),
            beside=beside,
            caches=self._caches,
            directory=self._directory,
        )

    def _say(self, task: Task, block: str) -> None:
        task.say(block)

    def _environment(self, task: Task | None) -> dict[str, str]:
        environment = {"BRANCHING": "1", "BRANCHING_WORKSPACE": str(self._workspace)}
        if task is not None:
            index = task.attempt.index
            environment |= {
                "BRANCHING_BRANCH": task.attempt.branch.name,
                "BRANCHING_ATTEMPT": "" if index == SETUP_INDEX else str(index),
                "BRANCHING_FEEDBACK": _fitting(task.attempt.feedback),
            }
        return environment


class Program(BranchCommand):
    """A command as a candidate: success is exit code 0."""

    def __call__(self, path: Path, *_: object) -> CandidateResult:
        """Runs the command in the branch at `path`. The result's value is a `process.Ended`.

        Raises:
            ValueError: The command succeeded and its score is not a number.
        """
        ended = self._run(path, self._stdout, self._stderr)
        # `read_scored` refuses NaN and infinity.
        score = number_in(ended.score)
        if ended.success and score is None and ended.score.strip():
            raise ValueError(f"the score on descriptor 3 is not a number: {ended.score[-80:]!r}")
        return CandidateResult(
            success=ended.success,
            value=ended,
            score=score,
            error="" if ended.success else self._error(ended),
            exit_code=ended.exit_code,
        )

    def _error(self, ended: Ended) -> str:
        return ended.reason


class FeedbackCandidate(Program):
    """A candidate that passes the end of its output as feedback to the next attempt."""

    def __call__(self, path: Path, *_: object) -> CandidateResult:
        _LAST_OUTPUT.lines = deque(maxlen=EXPLAINED_LINES_MAX)
        return super().__call__(path)

    def _say(self, task: Task, block: str) -> None:
        _LAST_OUTPUT.lines.extend(block.split("\n"))
        super()._say(task, block)

    def _error(self, ended: Ended) -> str:
        return "\n".join([ended.reason, *_LAST_OUTPUT.lines])


class Reader(BranchCommand):
    """A command as a callback. The result is the last ANSWER_BYTES_MAX bytes of its output."""

    def __call__(self, path: Path, *_: object) -> str:
        """Runs the command and returns its stripped output, whatever its exit code.

        The output of a failed test run is useful, too.

        Raises:
            ProcessBranchError: The command could not be run.
        """
        printed = OutputTail(ANSWER_BYTES_MAX)
        ended = self._run(path, printed.feed, self._stderr)
        if ended.how == "error":
            raise ProcessBranchError(ended.reason)
        return printed.text.strip()


def _limits_of(task: Task, stack: ExitStack) -> dict[str, Any]:
    """Returns the options of a Command that apply the limits of its branch."""
    budget = task.attempt.budget
    if budget is None:
        return {}
    scope = budget.scope()
    if scope is not None:
        stack.callback(scope.remove)
    return {
        "scope": scope,
        "wall_seconds": budget.wall_seconds,
        "disk_refusals": refusals_from_now(task.attempt.branch, budget),
    }


def refusals_from_now(branch: Branch, budget: CallLimits | None) -> Callable[[], int]:
    """Returns what counts the changes that the disk limit of the branch refuses from now on."""
    if budget is None or (budget.disk_each is None and budget.disk_together is None):
        return lambda: 0

    def count() -> int:
        try:
            return branch.inspect().disk_refusals or 0
        except BranchingError:
            return 0  # the branch is gone: another candidate won, and this result is not used

    before = count()
    return lambda: count() - before


def shell(text: str) -> list[str]:
    """Returns the argv that runs `text` in a shell."""
    return ["/bin/sh", "-c", text]


class BlockSplitter:
    """Splits a byte stream into blocks of whole lines of text, without the last newline.

    A block has the lines that arrived together. One call per line would take many times longer
    than all other processing.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""
        self._is_cut = False
        """Whether a part of the current line was already passed on."""

    def feed(self, arrived: bytes) -> None:
        """Adds data and passes on the lines that are now complete."""
        text = self._rest + self._decoder.decode(arrived)
        if text and self._is_cut:
            text = text.removeprefix("\n")  # ends the line that was passed on in pieces
            self._is_cut = False
        block, end, self._rest = text.rpartition("\n")
        if end:
            self._tell(re.sub(_RETURNS, "", block) if "\r" in block else block)
        if len(self._rest) >= LINE_CHARACTERS_MAX:
            self._tell(self._rest)
            self._rest = ""
            self._is_cut = True

    def finish(self) -> None:
        """Passes on the last line if it has no newline."""
        rest = self._rest + self._decoder.decode(b"", True)
        self._decoder.reset()
        self._rest = ""
        if rest:
            self._tell(rest)


class LineSplitter(BlockSplitter):
    """Splits a byte stream into lines of text and passes on each line separately."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        def tell_each(block: str) -> None:
            for line in block.split("\n"):
                tell(line)

        super().__init__(tell_each)


def _fitting(feedback: str) -> str:
    """Returns the feedback in a form that fits into an environment variable."""
    data = feedback.replace("\0", "").encode("utf-8", "surrogateescape")
    if len(data) > FEEDBACK_BYTES_MAX:
        left_out = len(data) - FEEDBACK_BYTES_MAX
        data = f"[{left_out} bytes left out]\n".encode() + data[left_out:]
    return data.decode("utf-8", "replace")


def number_in(text: str) -> float | None:
    """Returns the last line as a number, or None if it is not a number."""
    last = text.splitlines()[-1].strip() if text else ""
    try:
        return float(last)
    except ValueError:
        return None
