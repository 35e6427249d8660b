"""What all patterns share: the options every constructor takes, and how they open a runner.

A pattern object is configuration only. It can be called any number of times, from several threads
at once.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import TypedDict

from branching.errors import ProcessBranchError
from branching.fs import Branch, Workspace
from branching.patterns.event import OnEvent
from branching.patterns.runner import Runner

NameOf = Callable[[int], str]


class Options(TypedDict, total=False):
    """Keyword options that every pattern takes beside its own."""

    isolate_processes: bool
    """Each candidate runs in a process of its own."""
    resource_limits: object
    """Limits of each candidate; turns `isolate_processes` on."""
    group_limits: object
    """Limits of all candidates together."""
    on_event: OnEvent | None
    """Is told each step; see `Event`."""


class Pattern:
    """The common part. `label` starts the names of the branches a pattern makes."""

    label = "pattern"

    def __init__(
        self,
        *,
        timeout: float | None = None,
        max_parallel: int | None = None,
        isolate_processes: bool = False,
        resource_limits: object = None,
        group_limits: object = None,
        on_event: OnEvent | None = None,
    ) -> None:
        for option, wanted in (
            ("isolate_processes", isolate_processes),
            ("resource_limits", resource_limits is not None),
            ("group_limits", group_limits is not None),
        ):
            if wanted:
                raise ProcessBranchError(
                    f"{option} cannot be honoured: this version has no process isolation; "
                    "nothing ran",
                    hint=f"leave {option} out to run the candidates in threads, without limits",
                    limit=None if option == "isolate_processes" else option,
                )
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        if max_parallel is not None and max_parallel < 1:
            raise ValueError(f"max_parallel must be 1 or more, not {max_parallel!r}")
        self._timeout = timeout
        self._max_parallel = max_parallel
        self._on_event = on_event

    def _runner(self, parent: Workspace | Branch, name: NameOf | None = None) -> Runner:
        return Runner(
            parent,
            name=name or unique_names(self.label),
            timeout=self._timeout,
            max_parallel=self._max_parallel,
            on_event=self._on_event,
        )


def unique_names(label: str) -> NameOf:
    """Returns names that no other call uses: a dash, chance, a dash, the candidate's index."""
    call = secrets.token_hex(4)
    return lambda index: f"{label}-{call}-{index}"


def checked_candidates(candidates: object) -> list[Callable[..., object]]:
    """Returns the candidates as a list. TypeError or ValueError unless it is one of callables."""
    if not isinstance(candidates, (list, tuple)):
        raise TypeError(f"candidates must be a sequence of callables, not {candidates!r}")
    if not candidates:
        raise ValueError("there are no candidates: at least one is needed")
    for index, candidate in enumerate(candidates):
        if not callable(candidate):
            raise TypeError(f"candidate {index} is not callable: {candidate!r}")
    return list(candidates)
