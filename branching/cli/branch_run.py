"""Runs the command of `branching run` in a branch, and ends the branch.

All of it happens in the main thread: `process.command.Command` waits for the command, its output,
the time limit and signals in one place. For an output that is a terminal the command gets a
pseudo-terminal, otherwise a pipe. If standard output and standard error are the same file, it gets
one pipe for both, which preserves the order. A copy of the output is kept for `branching log`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from branching._cancellation import CancelScope
from branching._exit_codes import EXIT_TIMEOUT
from branching.cli.activity import shown_activity
from branching.cli.error_handling import note
from branching.cli.hints import RefusedWrites
from branching.cli.output import ended_how, note_forgotten, shortened_lines
from branching.cli.run_plan import End, Result, RunPlan
from branching.cli.signals import run_interruptible
from branching.errors import NamespaceError
from branching.fs import DiffSummary, Workspace
from branching.patterns.attempt import (
    Attempt,
    Task,
    changes_of,
    out_of_time,
    setup_failed,
    with_end,
)
from branching.patterns.branch_set import BranchSet
from branching.patterns.command_candidate import BlockSplitter, Program, shell
from branching.patterns.results import CandidateResult, State
from branching.process.pipes import Forward
from branching.runlog.events import SETUP_INDEX, Event, EventKind
from branching.runlog.run_log import COMMAND_SUFFIX, RunLog

if TYPE_CHECKING:
    from branching.process import Owner
    from branching.process.pty_proxy import PtyProxy


FORKS_MAX = 5
"""How often a branch is forked for a command that could not be started, as a sibling was committed
at that moment."""

_ANSWER_POLL_SECONDS = 0.1
"""How soon a signal ends the wait for a person's answer."""
_ENDS_BY_ITSELF = (None, "exit", "signal", "timeout", "cancelled")
"""Of these the exit code says enough; other ends are told in words."""


def run_in_branch(
    plan: RunPlan, name: str, workspace: Workspace, owner: Owner | None, stack: ExitStack
) -> tuple[Result, RefusedWrites]:
    """Runs the command of the plan in a branch `name`, and ends the branch.

    Args:
        plan: What to run, and how.
        name: Name of the branch.
        workspace: The workspace.
        owner: The user to run it as. Default: the user of this process.
        stack: Closes the run log, after the result is known.

    Returns:
        How the command ended, and what its output says of refused writes.

    Raises:
        Interrupted: A signal came before the branch was committed.
        BranchingError: The command could not be run, or its branch not be committed.
    """
    options: dict[str, Any] = {
        "workspace": workspace.seen_at,
        "owner": owner,
        "tells_output": False,
        **plan.isolation,
        **plan.place(workspace),
    }
    on_stderr: dict[str, Any] = {"stdout": 2}
    outputs: dict[str, Any] = {"stdout": plan.stdout}
    capture = None
    if not plan.no_log:
        book = stack.enter_context(RunLog.of(workspace, "run", has_thread=False))
        capture = stack.enter_context(_capture_output(book, owner, plan.stdout))
    if capture is not None:
        outputs = {"stdout": capture.stdout, "stderr": capture.stderr}
        outputs |= {"terminal": capture.terminal, "on_readable": book.on_readable}
        on_stderr = dict.fromkeys(("stdout", "stderr"), capture.forward(2))
    program = Program(plan.command, inherit_stdin=True, **outputs, **options)
    setup = Program(shell(plan.setup), **on_stderr, **options) if plan.setup else None

    def call() -> Result | None:
        for tries_left in reversed(range(FORKS_MAX)):
            run = _BranchRun(plan, workspace, name, None if capture is None else capture.on_event)
            try:
                return run.result(program, setup, may_fork_again=tries_left > 0)
            except _Outrun:
                pass
        raise AssertionError("the last try returns or raises")

    result = run_interruptible(call, is_done=lambda done: done is not None, has_thread=False)
    assert result is not None, "without a value the call was stopped, and that is raised"
    return result, RefusedWrites() if capture is None else capture.refused


class _Outrun(Exception):
    """Another command was committed before this one was started."""


class _Stopped(Exception):
    """The call was cancelled by a signal, or its time limit expired during the setup."""


class _BranchRun:
    """One branch, and the command that runs in it.

    With a setup command, that runs in a branch with the user's name. The command's own branch is
    forked from it, and merged into it at the end.
    """

    def __init__(
        self,
        plan: RunPlan,
        workspace: Workspace,
        name: str,
        listener: Callable[[Event], None] | None,
    ) -> None:
        self._plan = plan
        self._listener = listener
        scope = CancelScope.current()
        assert scope is not None, "it is called by run_interruptible"
        self._scope = scope
        self._deadline = math.inf if plan.timeout is None else time.monotonic() + plan.timeout
        self._budget = None
        if plan.limits is not None:
            from branching.process.call_limits import CallLimits

            self._budget = CallLimits(plan.limits, None)
        self._branches = BranchSet(
            workspace,
            lambda purpose: name + COMMAND_SUFFIX if plan.setup and purpose != "setup" else name,
            self._budget,
            is_between=plan.setup is not None,
            is_part=bool(plan.select),
            # Commands that run at the same time and change other paths are all committed.
            policy=workspace.concurrent_policy,
            ends_with_process=False,  # it is one piece of work, and its log tells of it
        )

    def result(
        self, program: Program, setup: Program | None, *, may_fork_again: bool
    ) -> Result | None:
        """Runs the command, and ends the branch.

        Returns:
            None if the call was cancelled. Nothing was committed then.

        Raises:
            _Outrun: Nothing ran, because a sibling was committed while the sandbox was made.
            BranchingError: The command could not be run, or its branch not be committed.
        """
        error: BaseException | None = None
        if self._budget is not None:
            self._budget.open()
        try:
            if setup is not None and (failed := self._set_up(setup)) is not None:
                return failed
            return self._command(program, may_fork_again=may_fork_again and setup is None)
        except _Stopped:
            return None
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._branches.clear(error)
            if self._budget is not None:
                self._budget.close()

    def _set_up(self, setup: Program) -> Result | None:
        """Runs the setup command. Returns the result of the call if its time expired in there."""
        branch = self._branches.open_between()
        assert branch is not None, "with a setup there is an intermediate branch"
        attempt = Attempt(SETUP_INDEX, branch, "", setup.label)
        self._run(setup, attempt)
        if attempt.state == "timed_out":
            return Result(EXIT_TIMEOUT, "timeout", End.abort)
        if attempt.answer.exception is not None:
            raise attempt.answer.exception
        if not attempt.succeeded:
            raise setup_failed(attempt.answer.error)
        return None

    def _command(self, program: Program, *, may_fork_again: bool) -> Result:
        branch = self._branches.branch("command").__enter__()
        attempt = Attempt(0, branch, "", program.label)
        self._run(program, attempt)
        if may_fork_again and _is_outrun(attempt):
            raise _Outrun
        code = _exit_code(attempt)
        how = ended_how(attempt.answer.value, attempt.state)
        end = self._plan.on_success if attempt.succeeded else self._plan.on_error
        if self._plan.ask:
            for line in shortened_lines(branch.diff(), sys.stderr):
                note(line)
            end = End.commit if _asked(self._scope) else End.abort
        if end is not End.commit:
            if end is not End.abort:
                self._branches.keep(self._branches.merged(branch))
            return Result(code, how, end)
        if self._scope.is_cancelled:
            raise _Stopped
        return self._commit(attempt, code, how)

    def _commit(self, attempt: Attempt, code: int, how: str | None) -> Result:
        plan, branches = self._plan, self._branches
        with shown_activity("committing"):
            branch = branches.merged(attempt.branch)
            changes = branches.commit(branch, plan.select, drop_rest=plan.drop_rest)
        attempt.changes = DiffSummary.of(changes)
        attempt.state = "won"
        self._tell(attempt, "committed")
        note_forgotten(branches.forgotten)
        return Result(
            code, how, End.commit, changes, branches.commit_id, branch.remaining, branch.name
        )

    def _run(self, program: Program, attempt: Attempt) -> None:
        """Runs a command in the branch of an attempt, which gets its state and result."""
        attempt.budget = self._budget
        attempt.begin()
        self._tell(attempt, "started")
        task = Task(attempt, must_end=True)
        task.deadline = self._deadline
        state: State
        self._scope.on_cancel(task.cancel)
        try:
            answer = with_end(task.run(program, attempt.path), task)
            state = "succeeded" if answer.success else "failed"
        except Exception as error:
            answer = with_end(CandidateResult(success=False, exception=error, exit_code=1), task)
            state = "error"
        finally:
            self._scope.forget(task.cancel)
        if self._scope.is_cancelled:
            state, answer = "cancelled", CandidateResult(success=False, exit_code=1)
        elif task.ended is not None and task.ended.how == "cancelled":
            assert self._plan.timeout is not None, "only then it has a deadline"
            state, answer = "timed_out", out_of_time(self._plan.timeout)
        attempt.end(state, answer)
        if self._listener is not None and state != "cancelled":
            attempt.changes = changes_of(attempt.branch)
        self._tell(attempt, "finished", attempt.reason)
        if state == "cancelled":
            raise _Stopped

    def _tell(self, attempt: Attempt, kind: EventKind, text: str = "") -> None:
        if self._listener is not None:
            self._listener(attempt.event(kind, text))


def _is_outrun(attempt: Attempt) -> bool:
    """Returns whether nothing ran, because a sibling was committed while the sandbox was made."""
    return isinstance(attempt.answer.exception, NamespaceError) and attempt.branch.is_stale()


def _exit_code(attempt: Attempt) -> int:
    if attempt.state == "timed_out":
        return EXIT_TIMEOUT
    if attempt.state == "error" and attempt.answer.exception is not None:
        raise attempt.answer.exception  # no process could be made: not the command's doing
    if ended_how(attempt.answer.value) not in _ENDS_BY_ITSELF:
        print(f"error: {attempt.answer.error}", file=sys.stderr, flush=True)
    return attempt.answer.exit_code


def _asked(scope: CancelScope) -> bool:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        print("Commit changes? [y/n] ", end="", file=sys.stderr, flush=True)
        while not poll.poll(_ANSWER_POLL_SECONDS * 1000):
            if scope.is_cancelled:
                raise _Stopped
        answer = os.read(0, 1024)
        if not answer or answer.strip().lower() in (b"n", b"no"):
            return False
        if answer.strip().lower() in (b"y", b"yes"):
            return True


class _OutputCapture:
    """The outputs of one command, which are logged, and of its setup command.

    Args:
        book: The run log.
        owner: The user of the command.
        stdout: The descriptor to forward standard output to.
    """

    def __init__(self, book: RunLog, owner: Owner | None, stdout: int) -> None:
        self._write = book.and_then(self._notice)
        # Guards the run log. The output of a terminal has its own thread.
        self._lock = threading.Lock()
        self._started: Event | None = None
        self.refused = RefusedWrites()
        self.terminal: PtyProxy | None = None
        is_input = os.isatty(0)
        terminals = [number for number in (stdout, 2) if os.isatty(number)]
        if is_input or terminals:
            from branching.process.pty_proxy import PtyProxy

            number = 0 if is_input else 1 if os.isatty(stdout) else 2
            self.terminal = PtyProxy(
                (terminals or [0])[0],
                self._new_lines(),
                owner,
                number=number,
                takes_keys=is_input,
            )
        self.stdout = self._output(stdout)
        is_same = os.path.sameopenfile(stdout, 2)
        self.stderr = self.stdout if is_same else self._output(2)

    def on_event(self, event: Event) -> None:
        """Logs an event of the command."""
        with self._lock:
            self._write(event)

    def forward(self, to: int) -> Forward:
        """Returns an output that is forwarded to a descriptor, and logged."""
        return Forward(to, self._new_lines())

    def _output(self, to: int) -> Forward | int:
        if self.terminal is not None and os.isatty(to):
            return self.terminal.slave
        return self.forward(to)

    def _notice(self, event: Event) -> None:
        if event.kind == "started":
            self._started = event

    def _new_lines(self) -> Callable[[bytes], None]:
        lines = BlockSplitter(self._keep)

        def keep(arrived: bytes) -> None:
            if arrived:
                lines.feed(arrived)
            else:
                lines.finish()

        return keep

    def _keep(self, block: str) -> None:
        with self._lock:
            self.refused.read(block)
            if self._started is not None:
                self._write(
                    Event(
                        kind="output",
                        index=self._started.index,
                        branch=self._started.branch,
                        text=block,
                    )
                )


@contextmanager
def _capture_output(
    book: RunLog, owner: Owner | None, stdout: int
) -> Iterator[_OutputCapture | None]:
    """Logs the output for the length of the `with`.

    Yields None if nothing can be logged. Inside a branch the output is logged as that of the
    candidate.
    """
    if not book.is_open:
        yield None
        return
    copy = _OutputCapture(book, owner, stdout)
    terminal = copy.terminal
    if terminal is None:
        yield copy
        return
    before = signal.signal(signal.SIGWINCH, lambda *_: terminal.resize())
    try:
        yield copy
    finally:
        signal.signal(signal.SIGWINCH, before)
        terminal.close()
