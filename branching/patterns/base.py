"""The base class of all patterns, with the options that every constructor accepts.

A pattern object holds configuration only. It can be called any number of times, also concurrently
from several threads.
"""

from __future__ import annotations

import inspect
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ForwardRef, TypedDict

import branching
from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching._threads import run_in_thread
from branching.fs import Branch, Workspace
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.process_isolation import IsolationOptions
from branching.patterns.runner import Cluster, RunElsewhere, Runner
from branching.runlog.events import OnEvent

if TYPE_CHECKING:
    import branching.process

NameOf = Callable[[int | str], str]
Expand = Callable[[Path, int], Sequence[Callable[[Path], object]]]
"""`expand(path, depth)` returns the strategies to try next, starting from the state at `path`."""


class Options(TypedDict, total=False):
    """Keyword options that every pattern accepts in addition to its own."""

    commit: bool
    """False leaves the winner's branch open, as the outcome's `branch`."""
    only: Sequence[str]
    """Glob patterns of the paths to commit. Default: all. The winner's branch stays open with its
    other changed paths, as the outcome's `branch`."""
    drop_rest: bool
    """Drop the paths that `only` leaves out, and close the branch."""
    setup: Callable[[Path], object] | None
    """`setup(path)` runs once before the candidates, in a branch that all of them are forked from.
    Its changes are committed together with those of the winner. A false return value other than
    None raises SetupError. An exception ends the call."""
    keep_failed: bool
    """Leave the branches open if no candidate succeeds. The caller must end them."""
    keep_losers: bool
    """Leave the branches of the other candidates open if there is a winner. With the policy
    first-winner they are stale. The caller must end them. Not with `setup`, a disk limit of the
    group, nor in a search by levels: these nest the branches."""
    runner: RunElsewhere | Cluster | None
    """Runs a candidate elsewhere: `runner(candidate, arguments, *, timeout)`, or the attempts on a
    cluster: `branching.cluster.RayRunner`."""
    max_parallel: int | None
    """Maximum number of candidates that run concurrently. Default: no maximum."""

    isolate_processes: bool
    """Run each candidate in a separate process in a sandbox, and kill it when it is not needed.
    Changes to variables are lost; return values are sent back."""
    resource_limits: branching.ResourceLimits | None
    """Limits of each candidate; turns `isolate_processes` on."""
    group_limits: branching.ResourceLimits | None
    """Limits of all candidates together; turns `isolate_processes` on."""
    isolation: branching.process.Isolation | None
    """"none" uses processes without a sandbox. This option and the next four are those of
    `BranchContext` and turn `isolate_processes` on. They apply to functions only; commands have
    their own options."""
    network: bool
    env: Mapping[str, str] | None
    clean_env: bool
    hide: Sequence[str]
    on_event: OnEvent | None
    """Called for each step of a candidate; see `Event`."""


class Pattern:
    """Base class of the patterns.

    The keyword arguments are those of every pattern; see `Options`. `timeout` is the time limit of
    a call in seconds, None for no limit. `label` is the prefix of the names of its branches.
    """

    label = "pattern"
    _is_nested = False
    """Whether it creates nested branches."""

    def __init_subclass__(cls) -> None:
        """Shows the shared options in the constructor's signature instead of `Unpack[Options]`."""
        init = cls.__init__
        own = inspect.signature(init)
        names = [name for name, each in own.parameters.items() if each.kind is each.VAR_KEYWORD]
        if not names:
            return
        shared = {
            name: each
            for name, each in inspect.signature(Pattern.__init__).parameters.items()
            if each.kind is each.KEYWORD_ONLY and name not in own.parameters
        }
        parameters = [each for name, each in own.parameters.items() if name not in names]
        init.__signature__ = own.replace(parameters=[*parameters, *shared.values()])  # type: ignore[attr-defined]
        for name in names:
            del init.__annotations__[name]
        # The annotations are evaluated in this module, where they are written.
        init.__annotations__ |= {
            name: ForwardRef(each.annotation, module=__name__) for name, each in shared.items()
        }

    def __init__(
        self,
        *,
        timeout: float | None = None,
        max_parallel: int | None = None,
        isolate_processes: bool = False,
        resource_limits: branching.ResourceLimits | None = None,
        group_limits: branching.ResourceLimits | None = None,
        isolation: branching.process.Isolation | None = None,
        network: bool = True,
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        hide: Sequence[str] = (),
        commit: bool = True,
        only: Sequence[str] = (),
        drop_rest: bool = False,
        setup: Callable[[Path], object] | None = None,
        keep_failed: bool = False,
        keep_losers: bool = False,
        runner: RunElsewhere | Cluster | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        for option, limits in (
            ("resource_limits", resource_limits),
            ("group_limits", group_limits),
        ):
            if limits is not None:
                from branching.process import ResourceLimits

                if not isinstance(limits, ResourceLimits):
                    raise TypeError(f"{option} must be ResourceLimits, not {limits!r}")
        limits_any = resource_limits is not None or group_limits is not None
        walls_any = isolation is not None or not network or env or clean_env or hide
        self._apart = None
        if isolate_processes or limits_any or walls_any:
            self._apart = IsolationOptions(
                isolation=isolation or "sandbox",
                network=network,
                env=dict(env or {}),
                clean_env=clean_env,
                hide=hide,
            )
        self._cluster: Cluster | None = None
        if runner is not None and not callable(runner):
            self._cluster, runner = runner, None
        if self._apart is not None and runner is not None:
            raise TypeError(
                "runner runs candidates elsewhere: it cannot be combined with isolation"
            )
        check_seconds("timeout", timeout)
        if max_parallel is not None and max_parallel < 1:
            raise ValueError(f"max_parallel must be 1 or more, not {max_parallel!r}")
        self._timeout = timeout
        self._max_parallel = max_parallel
        if isinstance(only, str):
            raise TypeError(f"only must be a sequence of globs, not the string {only!r}")
        if setup is not None and not callable(setup):
            raise TypeError(f"setup must be callable, not {setup!r}")
        self._commit = commit
        self._only = tuple(only)
        self._drop_rest = drop_rest
        self._setup = setup
        self._keep_failed = keep_failed
        has_group_disk = group_limits is not None and group_limits.disk is not None
        if keep_losers and (setup is not None or self._is_nested or has_group_disk):
            raise TypeError(
                "keep_losers cannot be combined with setup, a disk limit of the group, or a search "
                "by levels"
            )
        self._keep_losers = keep_losers
        self._elsewhere = runner
        self._on_event = on_event
        self._limits = resource_limits
        self._group_limits = group_limits

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Tries the candidates, chooses a winner and commits its branch.

        An exception of a callback propagates, and nothing is committed.

        Args:
            workspace: The workspace, or a branch in which to work.

        Returns:
            The outcome, with a result for each candidate.

        Raises:
            ConflictError: The commit conflicts with changes made elsewhere.
            CommitError: The commit was refused.
            SetupError: The setup failed.
        """
        raise NotImplementedError

    async def run_async(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Calls the pattern without blocking the event loop. Candidates still run in threads.

        Cancelling the task stops the candidates and drops their branches before CancelledError
        propagates. Cancelling it again shortens the grace period of the candidates.

        Args:
            workspace: The workspace, or a branch in which to work.

        Returns:
            The outcome, with a result for each candidate.
        """
        return await run_cancellable(lambda: self(workspace))

    def _runner(self, parent: Workspace | Branch) -> Runner:
        options = self._runner_options()
        if self._cluster is None:
            return Runner(parent, elsewhere=self._elsewhere, **options)
        return self._cluster.open_runner(parent, **options)

    def _runner_options(self) -> dict[str, Any]:
        return {
            "name": unique_names(self.label),
            "timeout": self._timeout,
            "max_parallel": self._max_parallel,
            "commit": self._commit,
            "only": self._only,
            "drop_rest": self._drop_rest,
            "setup": self._setup,
            "keep_failed": self._keep_failed,
            "keep_losers": self._keep_losers,
            "is_nested": self._is_nested,
            "on_event": self._on_event,
            "apart": self._apart,
            "limits": self._limits,
            "group_limits": self._group_limits,
        }


class SessionPattern(Pattern):
    """A pattern whose candidates can start from the memory of a session."""

    _session: branching.Session | None

    def __call__(self, workspace: Workspace | Branch | None = None) -> SpeculationOutcome:
        """Runs the candidates and commits the winner; see `Pattern.__call__`.

        Args:
            workspace: The workspace, or a branch in which to work; None with a session.

        Raises:
            TypeError: There is neither a workspace nor a session, or there are both.
        """
        if self._session is None:
            if workspace is None:
                raise TypeError("a workspace is needed: call the pattern with one")
            return self._run(workspace)
        if workspace is not None:
            raise TypeError("the session has its workspace: call the pattern without one")
        return self._run_in_session(self._session)

    async def run_async(self, workspace: Workspace | Branch | None = None) -> SpeculationOutcome:
        """Does the same as a call without blocking the event loop; see `Pattern.run_async`.

        Args:
            workspace: The workspace, or a branch in which to work; None with a session. Cancelling
                the task kills the children of a session, and the session goes on as before.

        Returns:
            The outcome, with a result for each candidate.
        """
        return await run_cancellable(lambda: self(workspace))

    def _run(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        raise NotImplementedError

    def _run_in_session(self, session: branching.Session) -> SpeculationOutcome:
        raise NotImplementedError

    def _check_session(self) -> None:
        """Raises TypeError if an option was given that a session has no use for."""
        given = {
            "commit=False": not self._commit,
            "only": bool(self._only),
            "setup": self._setup is not None,
            "keep_failed": self._keep_failed,
            "keep_losers": self._keep_losers,
            "runner": self._elsewhere is not None or self._cluster is not None,
            "on_event": self._on_event is not None,
            "isolation, and limits of candidates,": self._apart is not None,
        }
        for name, is_given in given.items():
            if is_given:
                raise TypeError(f"{name} cannot be combined with session")


async def run_cancellable(call: Callable[[], SpeculationOutcome]) -> SpeculationOutcome:
    """Runs a call in a thread, under a scope that a cancellation of the task cancels.

    Args:
        call: The call of a pattern.
    """
    scope = CancelScope()
    return await run_in_thread(
        lambda: scope.run(call),
        on_cancel=lambda again: scope.cancel(0.0 if again else STOP_GRACE_SECONDS),
    )


def check_seconds(name: str, seconds: float | None) -> None:
    """Checks a duration.

    Args:
        name: Name of the option, for the message.
        seconds: The duration, or None.

    Raises:
        ValueError: The duration is not positive and finite.
    """
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} must be a positive number of seconds, not {seconds!r}")


def unique_names(label: str) -> NameOf:
    """Returns a function that names the branches of one call: label, random part, purpose."""
    call = secrets.token_hex(4)
    return lambda purpose: f"{label}-{call}-{purpose}"


def checked_candidates(
    candidates: object, *, can_be_empty: bool = False, can_be_code: bool = False
) -> list[Callable[..., object]]:
    """Returns the candidates as a list.

    Args:
        candidates: A list or tuple of callables.
        can_be_empty: Accept an empty sequence.
        can_be_code: Accept Python code, too.

    Raises:
        TypeError: It is not a list or tuple of callables.
        ValueError: It is empty.
    """
    if not isinstance(candidates, (list, tuple)):
        raise TypeError(f"candidates must be a sequence of callables, not {candidates!r}")
    if not candidates and not can_be_empty:
        raise ValueError("there are no candidates: at least one is needed")
    for index, candidate in enumerate(candidates):
        if not callable(candidate) and not (can_be_code and isinstance(candidate, str)):
            raise TypeError(f"candidate {index} is not callable: {candidate!r}")
    return list(candidates)


def expand_candidates(
    candidates_or_task: object, n: int | None, default_n: int, *, can_be_code: bool = False
) -> list[tuple[Callable[..., object], tuple[int, ...]]]:
    """Returns the calls of a pattern: one task `n` times, or each candidate once.

    Args:
        candidates_or_task: A task `task(path, index)`, or a sequence of candidates.
        n: Number of calls of the task; None for a sequence.
        default_n: Number of calls of the task if `n` is None.
        can_be_code: Accept Python code as a candidate.

    Returns:
        Pairs of a function and its arguments after the path.

    Raises:
        TypeError: `n` is given for a sequence, or a candidate is not callable.
        ValueError: `n` is less than 1, or there are no candidates.
    """
    if callable(candidates_or_task):
        count = default_n if n is None else n
        if count < 1:
            raise ValueError(f"n must be 1 or more, not {count!r}")
        return [(candidates_or_task, (index,)) for index in range(count)]
    if n is not None:
        raise TypeError("n is for a single task; a sequence of candidates has its own length")
    candidates = checked_candidates(candidates_or_task, can_be_code=can_be_code)
    return [(candidate, ()) for candidate in candidates]
