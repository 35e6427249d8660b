"""Runs a function or a command in a separate process that sees one branch as the workspace.

    with BranchContext(target, branch) as context:
        context.wait()

Entering the `with` starts the process. Leaving it ends the process and all its descendants. The
process is not forked from this program, which may have threads, but by the fork server. The target
is sent there with copies of all objects it refers to (`function_pickle`). Its return value or
exception is sent back (`result_channel`).

The lock of a Branch is held while the process runs, so that its unfinished work is not committed. A
plain directory has no lock.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from branching._exit_codes import EXIT_CANNOT_EXECUTE
from branching._standard_streams import NUMBERS, is_stream, open_closed
from branching._threads import run_in_thread
from branching.errors import NamespaceError, ProcessBranchError
from branching.process import enforce
from branching.process.environment import environment_for
from branching.process.functions import function_pickle, result_channel
from branching.process.limits import ResourceLimits
from branching.process.pipes import Pipes, Sink
from branching.process.process_result import Ended, ended_by
from branching.process.run_as import Owner
from branching.process.sandbox import Isolation, Sandbox, validate_isolation
from branching.process.sandbox.launcher import LaunchRefused
from branching.process.sandboxed_process import SandboxedProcess
from branching.process.supervisor import Supervisor

R = TypeVar("R")
Target = Callable[[Path], object] | Sequence[str]

CANCEL_GRACE_SECONDS = 1.0
"""Time between SIGTERM and SIGKILL when a waiting task is cancelled."""


@dataclass(frozen=True, kw_only=True)
class Result(Ended):
    """How the process ended, and the result of the target."""

    value: object = None
    """Return value of the target."""
    exception: BaseException | None = None
    """Exception of the target. Its cause has the traceback as text."""

    @property
    def ended(self) -> str:
        """The cause of the end in one word; see `How`."""
        return self.how


class BranchContext:
    """Runs `target(path)` in a separate process that sees a branch as the workspace.

    The process inherits the standard streams of this program. Of other open files it gets only
    pipes to whose file objects (`open(number, "wb")`) the target refers; a bare descriptor number
    is not valid in the process.

    Args:
        target: A function, or a command as a sequence of strings. A function is called with the
            path at which it sees the workspace, which is also its working directory. Returning is
            success, raising is failure, and SystemExit sets the exit code.
        workspace: A Branch, or the directory of a branch. No process can commit or rebase a Branch
            while the process runs (`Branch.in_use`); for a directory nothing prevents that.
        isolate: Has no effect: the process is always isolated.
        close_fds: Refuse targets that refer to pipes. A function still has one open file for its
            result, which programs that it starts do not inherit.
        limits: Resource limits, in force before the target starts.
        parent_cgroup: The control group in which to create that of the process.
        isolation: "none" runs the process without a sandbox, in the directory itself, with access
            to all files of its user.
        seen_at: The path at which the process sees the workspace. Default: the root of the
            branch's mount.
        network: False leaves the process only the loopback interface.
        env: Variables to add to the environment.
        clean_env: Start with an almost empty environment.
        hide: Glob patterns of files that the process cannot read.
        stdout: A descriptor, or a function that is called with the output while `wait()` runs.
        stderr: The same for standard error.
        disk_refusals: Returns how many changes the disk limit of the branch has refused since the
            process started.
        accept: Classes whose instances may be part of the result even though they belong to
            installed packages or define their own unpickling (`__reduce__`, `__setstate__`).
        arguments: Further arguments for the target, after the path.
        preload: Modules that are imported before the process becomes the owner of the workspace,
            who may not be able to read them.

    Raises:
        TypeError: The target is neither a function nor a non-empty sequence of strings, or `hide`
            is a string.
        ValueError: A glob is invalid, or options exclude each other.
    """

    def __init__(
        self,
        target: Target,
        workspace: Any,
        *,
        isolate: bool = False,  # noqa: ARG002
        close_fds: bool = False,
        limits: ResourceLimits | None = None,
        parent_cgroup: Any = None,
        isolation: Isolation = "sandbox",
        seen_at: str | os.PathLike[str] | None = None,
        network: bool = True,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        hide: Sequence[str] = (),
        stdout: Sink = None,
        stderr: Sink = None,
        disk_refusals: Callable[[], int] = lambda: 0,
        accept: Sequence[type] = (),
        arguments: Sequence[object] = (),
        preload: Sequence[str] = (),
    ) -> None:
        if not callable(target):
            if isinstance(target, str) or not target:
                raise TypeError("the target must be a function, or a command as a list of words")
            target = [os.fspath(word) for word in target]
        validate_isolation(isolation, network=network, hide=hide)
        self._target = target
        self._workspace = Path(getattr(workspace, "path", workspace))
        self._in_use = getattr(workspace, "in_use", nullcontext)
        self._lock = ExitStack()
        self._close_fds = close_fds
        self._limits = limits
        self._parent_group = parent_cgroup
        self._isolation: Isolation = isolation
        self._seen_at = seen_at
        self._network = network
        self._env = dict(env or {})
        self._clean_env = clean_env
        self._hide = tuple(hide)
        self._sinks = {1: stdout, 2: stderr}
        self._disk_refusals = disk_refusals
        self._accept = tuple(accept)
        self._arguments = tuple(arguments)
        self._preload = tuple(preload)

        self._supervisor = Supervisor()
        self._attending = threading.Lock()  # held by the thread in wait(); guards all below
        self._stack = ExitStack()
        self._process: SandboxedProcess | None = None
        self._pid: int | None = None
        self._originals: list[object] = []
        self._result_file = -1
        self._started_at = 0.0
        self._pipes: Pipes
        self._scope: Any = None
        self._result: Result | None = None

    @property
    def pid(self) -> int:
        """Process id of the target, as seen from this program.

        Raises:
            ProcessBranchError: The process was not started.
        """
        if self._pid is None:
            raise ProcessBranchError("Process not started")
        return self._pid

    @property
    def alive(self) -> bool:
        """Whether the process or one of its descendants is still running."""
        process = self._process
        return process is not None and self._result is None and not process.has_ended()

    @property
    def cgroup_scope(self) -> Path | None:
        """The directory of the process's control group; None if no limit needs one."""
        return None if self._scope is None else self._scope.path

    @property
    def result(self) -> Result:
        """How the process ended, and the result of the target.

        Raises:
            ProcessBranchError: The process has not ended.
        """
        if self._result is None and not self.alive:
            with self._attending:
                self._collect()
        if self._result is None:
            raise ProcessBranchError(f"process {self.pid} has not ended yet")
        return self._result

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the process to end.

        Args:
            timeout: Maximum time to wait, in seconds. Default: no maximum.

        Raises:
            TimeoutError: The process is still running after `timeout` seconds.
            ProcessBranchError: The process failed. The target's exception is the `__cause__`.
        """
        _ = self.pid
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._attending.acquire(
            timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        ):
            raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
        try:
            if self._result is None:
                if self._process is None:
                    raise ProcessBranchError(f"process {self.pid} did not die when it was killed")
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._supervisor.supervise(self._process, self._pipes, left):
                    raise TimeoutError(f"process {self.pid} did not end within {timeout:g} s")
                self._collect()
        finally:
            self._attending.release()
        result = self.result
        if not result.success:
            raise ProcessBranchError(
                f"process {self.pid} exited with status {result.exit_code}: {result.reason}"
            ) from result.exception

    async def wait_async(self, timeout: float | None = None) -> None:
        """Waits for the process to end without blocking the event loop.

        Cancelling the task sends SIGTERM to the process. SIGKILL follows if the process does not
        end or the task is cancelled again. CancelledError propagates when all processes are gone.

        Args:
            timeout: Maximum time to wait, in seconds. Default: no maximum.

        Raises:
            TimeoutError: The process is still running after `timeout` seconds.
            ProcessBranchError: The process failed. The target's exception is the `__cause__`.
        """

        def hurry(again: bool) -> None:
            self._supervisor.kill(0.0 if again else CANCEL_GRACE_SECONDS)

        await run_in_thread(lambda: self.wait(timeout), on_cancel=hurry)

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Requests the end of the process and returns immediately. Safe to call from any thread.

        Args:
            grace_seconds: Time between SIGTERM and SIGKILL.
        """
        self._supervisor.kill(grace_seconds)

    def pause(self, *, is_on: bool = True) -> None:
        """Pauses the process and its descendants (SIGSTOP), or resumes them.

        It has an effect only while a thread is in `wait()`. The time limit is not paused.

        Args:
            is_on: False resumes.
        """
        self._supervisor.pause(is_on=is_on)

    def abort(self, timeout: float = 5.0) -> None:
        """Ends the process and its descendants, and waits for this. Does nothing after the end.

        Args:
            timeout: Time between SIGTERM and SIGKILL, in seconds.
        """
        if self._process is None or self._result is not None:
            return
        if not self._process.has_ended():
            self._supervisor.kill(timeout)
        with self._attending:
            if self._process is not None and self._result is None:
                self._supervisor.supervise(self._process, self._pipes)
                self._collect()

    def __enter__(self) -> BranchContext:
        if self._pid is not None:
            raise ProcessBranchError("it was started before: a BranchContext serves one `with`")
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.abort()
        finally:
            self._stack.close()

    async def __aenter__(self) -> BranchContext:
        return await _entered(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_in_thread(lambda: self.__exit__(kind, error, traceback))

    @staticmethod
    def create(targets: Sequence[Target], workspaces: Sequence[Any], **options: Any) -> Contexts:
        """Returns a context manager that starts one BranchContext for each target.

        Leaving the `with` or `async with` ends all of them. Entering it raises ValueError if the
        sequences differ in length.

        Args:
            targets: The targets.
            workspaces: The workspace of each target, in the same order.
            **options: Options for each BranchContext.

        Returns:
            The context manager. Its value is the list of contexts.
        """
        return Contexts(targets, workspaces, options)

    def _start(self, stack: ExitStack) -> None:
        open_closed()
        try:
            place = Path(os.path.realpath(self._workspace, strict=True))
            owner = stack.enter_context(Owner.of(place.stat().st_uid, place.stat().st_gid))
            sandbox = Sandbox.of(
                place,
                at=place if self._isolation == "none" else self._seen_at,
                hide=self._hide,
                network=self._network,
                home=Owner.home_of(owner),
            )
        except OSError as error:
            raise NamespaceError(
                f"the workspace cannot be used: {error}; nothing ran", path=str(self._workspace)
            ) from error
        stack.enter_context(self._lock).enter_context(self._in_use())
        self._pipes = stack.enter_context(Pipes(self._sinks, owner, score=False))
        stack.enter_context(self._supervisor)
        self._result_file = result_channel.new_file()
        stack.callback(os.close, self._result_file)
        descriptors = self._descriptors(stack)
        options: dict[str, Any] = {}
        passed = stack.enter_context(ExitStack())
        if callable(self._target):
            packed = function_pickle.pack(
                self._target, sandbox.at, *self._arguments, passes_files=not self._close_fds
            )
            for file in packed.files:
                passed.callback(os.close, file)
            self._originals = packed.originals
            descriptors |= enumerate(packed.files, function_pickle.FIRST_FILE)
            number = max(descriptors) + 1
            descriptors[number] = self._result_file
            options = {"call": packed.data, "result": number, "path": sys.path}
            options["preload"] = self._preload
        else:
            options = {"argv": self._target}
        limits = self._limits
        if limits is not None or self._parent_group is not None:
            self._scope = enforce.cgroup_for(limits, self._parent_group)
            if self._scope is not None:
                stack.enter_context(self._scope)
        self._started_at = time.monotonic()
        try:
            self._process = SandboxedProcess(
                sandbox,
                isolation=self._isolation,
                environment=environment_for(
                    sandbox.at,
                    owner,
                    added=self._env,
                    is_clean=self._clean_env,
                    has_own_tmp=self._isolation != "none",
                ),
                owner=owner,
                descriptors=descriptors,
                admit=None if self._scope is None else self._scope.add,
                wall_seconds=None if limits is None else limits.wall_time,
                **options,
            )
        except LaunchRefused as refused:
            raise ProcessBranchError(
                f"{self._target[0]} cannot be executed: {refused.strerror}; nothing ran"  # type: ignore[index]
            ) from None
        self._pid = self._process.pid
        stack.callback(self._abandon)
        self._pipes.close_child_ends()
        passed.close()  # so that the other ends of these pipes see the end of the process

    def _descriptors(self, stack: ExitStack) -> dict[int, int]:
        """Returns the standard streams of the process, by descriptor number."""
        found = {}
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, nothing)
        for number in NUMBERS:
            end = self._pipes.child_end(number) if number else None
            found[number] = end if end is not None else number if is_stream(number) else nothing
        return found

    def _abandon(self) -> None:
        """Ends the process if `abort` was interrupted."""
        if self._result is None and self._process is not None:
            self._process.finish()

    def _collect(self) -> None:
        """Reaps the process and records its result. The caller holds the lock."""
        if self._result is not None or self._process is None:
            return
        try:
            status = self._process.finish()
        except BaseException:
            self._process = None  # killed, but it did not die in time; do not retry
            raise
        self._pipes.drain()
        home = result_channel.read(self._result_file, self._originals, self._accept)
        if self._scope is not None:
            self._scope.remove()
        error, reason = home.exception, ""
        if error is not None and status.returncode >= 0:
            reason = f"{type(error).__name__}: {error}"
            status = status._replace(returncode=status.returncode or EXIT_CANNOT_EXECUTE)
        told = ended_by(
            status,
            is_cancelled=self._supervisor.is_kill_asked,
            wall_seconds=time.monotonic() - self._started_at,
            usage=None if self._scope is None else self._scope.usage(),
            disk_refusals=self._disk_refusals(),
            reason=reason,
        )
        facts = {field.name: getattr(told, field.name) for field in fields(told)}
        self._result = Result(**facts, value=home.value, exception=error)
        self._lock.close()


class Contexts:
    """Several contexts that are started and ended together; see `BranchContext.create`."""

    def __init__(
        self, targets: Sequence[Target], workspaces: Sequence[Any], options: Mapping[str, Any]
    ) -> None:
        self._targets = targets
        self._workspaces = workspaces
        self._options = options
        self._stack = ExitStack()

    def __enter__(self) -> list[BranchContext]:
        if len(self._targets) != len(self._workspaces):
            raise ValueError("targets and workspaces must have the same length")
        with ExitStack() as stack:
            started = [
                stack.enter_context(BranchContext(target, workspace, **self._options))
                for target, workspace in zip(self._targets, self._workspaces, strict=True)
            ]
            self._stack = stack.pop_all()
        return started

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    async def __aenter__(self) -> list[BranchContext]:
        return await _entered(self)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await run_in_thread(lambda: self.__exit__(kind, error, traceback))


async def _entered(manager: AbstractContextManager[R]) -> R:
    """Enters `manager` in a thread. If the task is cancelled meanwhile, exits it again."""
    is_entered = False

    def enter() -> R:
        nonlocal is_entered
        value = manager.__enter__()
        is_entered = True
        return value

    try:
        return await run_in_thread(enter)
    except BaseException:
        if is_entered:
            await run_in_thread(lambda: manager.__exit__(None, None, None))
        raise
