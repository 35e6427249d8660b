"""What all patterns share: the options every constructor takes, and how they open a runner.

A pattern object is configuration only. It can be called any number of times, from several threads
at once.
"""

from __future__ import annotations

import inspect
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ForwardRef, TypedDict

import branching
from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching._threads import run_in_thread
from branching.fs import Branch, Workspace
from branching.patterns.process_isolation import IsolationOptions
from branching.patterns.results import SpeculationOutcome
from branching.patterns.runner import RunElsewhere, Runner
from branching.runlog.events import OnEvent

if TYPE_CHECKING:
    import branching.process

NameOf = Callable[[int | str], str]
Expand = Callable[[Path, int], Sequence[Callable[[Path], object]]]
"""`expand(path, depth)`: the strategies to try next from what is at `path`."""


class Options(TypedDict, total=False):
    """Keyword options that every pattern takes beside its own."""

    commit: bool
    """False: choose, but leave the winner's branch open; it is the outcome's `branch`."""
    only: Sequence[str]
    """Globs of the paths to commit; all unless given. The winner's branch stays open with the other
    paths that it changed; it is the outcome's `branch` then."""
    drop_rest: bool
    """Drop what `only` leaves, and close the branch."""
    setup: Callable[[Path], object] | None
    """`setup(path)` runs once before the candidates, in a branch that all of them are forked from.
    What it made is committed with the winner, and with a winner only. SetupError if it returns
    something false other than None; what it raises ends the call."""
    keep_failed: bool
    """When nothing succeeds, leave the branches open, for the caller to look at and to end."""
    runner: RunElsewhere | None
    """Runs a candidate elsewhere: `runner(candidate, arguments, *, timeout)`."""
    max_parallel: int | None
    """How many candidates run at once; all unless given."""

    isolate_processes: bool
    """Each candidate runs in a process of its own, in a sandbox, and dies when it is not needed.
    What it changes in variables is lost; what it returns comes back."""
    resource_limits: branching.ResourceLimits | None
    """Limits of each candidate; turns `isolate_processes` on."""
    group_limits: branching.ResourceLimits | None
    """Limits of all candidates together; turns `isolate_processes` on."""
    isolation: branching.process.Isolation | None
    """"none": processes without a sandbox. It and the next four are those of `BranchContext`, turn
    `isolate_processes` on, and are for functions: a command is told its own."""
    network: bool
    env: Mapping[str, str] | None
    clean_env: bool
    hide: Sequence[str]
    on_event: OnEvent | None
    """Is told each step; see `Event`."""


class Pattern:
    """The common part. `label` starts the names of the branches a pattern makes."""

    label = "pattern"
    _is_nested = False
    """It may fork branches from branches."""

    def __init_subclass__(cls) -> None:
        """Puts the shared options into the signature, in place of `Unpack[Options]`."""
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
        # They are evaluated where they were written.
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
        runner: RunElsewhere | None = None,
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
        if self._apart is not None and runner is not None:
            raise TypeError("runner runs candidates elsewhere: it cannot be had with isolation")
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
        self._elsewhere = runner
        self._on_event = on_event
        self._limits = resource_limits
        self._group_limits = group_limits

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Tries, chooses, commits. Raises what a callback raised, and ConflictError or CommitError
        when the commit was refused; whatever it raises, nothing was committed.
        """
        raise NotImplementedError

    async def run_async(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Does the same without blocking the event loop: candidates run in threads as ever.

        Cancelling the task ends the call in order, candidates and branches with it, before
        CancelledError goes on; cancelling it again hurries that.
        """
        scope = CancelScope()
        return await run_in_thread(
            lambda: scope.run(self, workspace),
            on_cancel=lambda again: scope.cancel(0.0 if again else STOP_GRACE_SECONDS),
        )

    def _runner(self, parent: Workspace | Branch) -> Runner:
        return Runner(
            parent,
            name=unique_names(self.label),
            timeout=self._timeout,
            max_parallel=self._max_parallel,
            commit=self._commit,
            only=self._only,
            drop_rest=self._drop_rest,
            setup=self._setup,
            keep_failed=self._keep_failed,
            is_nested=self._is_nested,
            elsewhere=self._elsewhere,
            on_event=self._on_event,
            apart=self._apart,
            limits=self._limits,
            group_limits=self._group_limits,
        )


def check_seconds(name: str, seconds: float | None) -> None:
    """Raises ValueError unless it is a time one can wait for, or None."""
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} must be a positive number of seconds, not {seconds!r}")


def unique_names(label: str) -> NameOf:
    """Returns names that no other call uses: the label, chance, and what the branch is for."""
    call = secrets.token_hex(4)
    return lambda purpose: f"{label}-{call}-{purpose}"


def checked_candidates(
    candidates: object, *, can_be_empty: bool = False
) -> list[Callable[..., object]]:
    """Returns the candidates as a list. TypeError or ValueError unless it is one of callables."""
    if not isinstance(candidates, (list, tuple)):
        raise TypeError(f"candidates must be a sequence of callables, not {candidates!r}")
    if not candidates and not can_be_empty:
        raise ValueError("there are no candidates: at least one is needed")
    for index, candidate in enumerate(candidates):
        if not callable(candidate):
            raise TypeError(f"candidate {index} is not callable: {candidate!r}")
    return list(candidates)


def expand_candidates(
    candidates_or_task: object, n: int | None, default_n: int
) -> list[tuple[Callable[..., object], tuple[int, ...]]]:
    """Returns what to call for each try: one task `n` times, or each candidate once."""
    if callable(candidates_or_task):
        count = default_n if n is None else n
        if count < 1:
            raise ValueError(f"n must be 1 or more, not {count!r}")
        return [(candidates_or_task, (index,)) for index in range(count)]
    if n is not None:
        raise TypeError("n is for a single task; a sequence of candidates has its own length")
    return [(candidate, ()) for candidate in checked_candidates(candidates_or_task)]
