"""TreeOfThoughts: chooses the best strategy, then the best refinement of it, level by level."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import Expand, Options, Pattern, checked_candidates
from branching.patterns.outcome import SpeculationOutcome
from branching.patterns.results import read_scored
from branching.patterns.runner import Runner
from branching.patterns.scoring import Evaluate, Rating

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TreeOfThoughts(Pattern):
    """Runs strategies in parallel branches and commits the best success.

    With `expand` and a `max_depth` above 1, the search has several levels. The best success of a
    level is merged into a root branch, from which the strategies of the next level start. The root
    branch is committed at the end. If no strategy of a level succeeds, nothing is committed.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        strategies: Functions `strategy(path)` that return a bool or a pair (bool, score).
        evaluate: Returns the score of the branch at `path`. It replaces a returned score.
        expand: `expand(path, depth)` returns the strategies of the next level (depth 1, 2, ...)
            for the root branch at `path`. An empty list ends the search.
        max_depth: Maximum number of levels.
        timeout: Time limit of a call in seconds. It ends the search with the best success of the
            level that it interrupts. Default: no limit.

    Raises:
        TypeError: A strategy is not callable, or an option has the wrong type.
        ValueError: There are no strategies, or an option has an invalid value.
    """

    label = "tree-of-thoughts"

    def __init__(
        self,
        strategies: Sequence[Callable[[Path], object]],
        *,
        evaluate: Evaluate | None = None,
        expand: Expand | None = None,
        max_depth: int = 1,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._strategies = checked_candidates(strategies)
        if max_depth < 1:
            raise ValueError(f"max_depth must be 1 or more, not {max_depth!r}")
        self._rating = Rating(evaluate)
        self._expand = expand
        self._max_depth = max_depth
        self._is_nested = expand is not None and max_depth > 1

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Searches and commits the best success; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            if self._expand is not None and self._max_depth > 1:
                self._go_deeper(runner, self._expand)
            elif best := self._best(runner, self._strategies):
                runner.commit(best)
        return runner.outcome()

    def _best(
        self,
        runner: Runner,
        strategies: Sequence[Callable[..., object]],
        parent: Branch | None = None,
        predecessor: Attempt | None = None,
    ) -> Attempt | None:
        for strategy in strategies:
            runner.start(
                strategy,
                read=read_scored,
                evaluate=self._rating.evaluate,
                parent=parent,
                predecessor=predecessor,
            )
        return next(iter(self._rating.best(runner, 1)), None)

    def _go_deeper(self, runner: Runner, expand: Expand) -> None:
        root = runner.fork("root")
        strategies = self._strategies
        best: Attempt | None = None
        for depth in range(1, self._max_depth + 1):
            if (found := self._best(runner, strategies, root, best)) is None:
                return
            best = found
            runner.stop()
            runner.merge(best)
            if depth == self._max_depth or runner.is_over:
                break
            said = runner.consult(best, expand, root.path, depth)
            strategies = checked_candidates(said, can_be_empty=True)
            if not strategies:
                break
        assert best is not None, "max_depth is 1 or more"
        runner.commit(best, root)
