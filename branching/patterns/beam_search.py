"""BeamSearch: continues from the best few branches at each level."""

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


class BeamSearch(Pattern):
    """Runs strategies in parallel branches and continues from the `beam_width` best successes.

    The strategies of the next level run in branches nested in those of the beams, which copies no
    data. All successes of a level are ranked together. A beam without a successor among the best
    is dropped. After the last level the best success is committed with the branches it is nested
    in. If no strategy of a level succeeds, nothing is committed.

    All options of `branching.patterns.base.Options` are accepted as keyword arguments, too.

    Args:
        strategies: Functions `strategy(path)` that return a bool or a pair (bool, score).
        expand: `expand(path, depth)` returns the strategies to try on the beam at `path` (depth 1,
            2, ...). The search ends when it returns an empty list for every beam.
        evaluate: Returns the score of the branch at `path`. It replaces a returned score.
        beam_width: Number of branches to continue from at each level.
        max_depth: Maximum number of levels.
        timeout: Time limit of a call in seconds. It ends the search with the best success of the
            level that it interrupts. Default: no limit.

    Raises:
        TypeError: A strategy is not callable, or an option has the wrong type.
        ValueError: There are no strategies, or an option has an invalid value.
    """

    label = "beam-search"

    def __init__(
        self,
        strategies: Sequence[Callable[[Path], object]],
        *,
        expand: Expand,
        evaluate: Evaluate | None = None,
        beam_width: int = 3,
        max_depth: int = 2,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self._strategies = checked_candidates(strategies)
        for name, value in (("beam_width", beam_width), ("max_depth", max_depth)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value!r}")
        self._rating = Rating(evaluate)
        self._expand = expand
        self._beam_width = beam_width
        self._max_depth = max_depth
        self._is_nested = max_depth > 1

    def __call__(self, workspace: Workspace | Branch) -> SpeculationOutcome:
        """Searches and commits the best success; see `Pattern.__call__`."""
        with self._runner(workspace) as runner:
            parents: dict[Attempt, Attempt] = {}
            for strategy in self._strategies:
                runner.start(strategy, read=read_scored, evaluate=self._rating.evaluate)
            beams = self._prune(runner, [], parents, depth=1)
            for depth in range(1, self._max_depth):
                if not beams or runner.is_over:
                    break
                plan = [
                    (beam, checked_candidates(said, can_be_empty=True))
                    for beam in beams
                    for said in [runner.consult(beam, self._expand, beam.path, depth)]
                ]
                if not any(strategies for _, strategies in plan):
                    break
                for beam, strategies in plan:
                    for strategy in strategies:
                        child = runner.start(
                            strategy,
                            read=read_scored,
                            evaluate=self._rating.evaluate,
                            parent=beam.branch,
                            predecessor=beam,
                        )
                        parents[child] = beam
                beams = self._prune(runner, beams, parents, depth=depth + 1)
            if beams:
                runner.stop()
                runner.commit(beams[0], self._merged(runner, beams, parents))
        return runner.outcome()

    def _prune(
        self,
        runner: Runner,
        beams: list[Attempt],
        parents: dict[Attempt, Attempt],
        *,
        depth: int,
    ) -> list[Attempt]:
        """Returns the best successes of a level. Drops the others, and beams without successor."""
        # Nothing continues from the last level: only its best success is needed.
        width = self._beam_width if depth < self._max_depth else 1
        best = self._rating.best(runner, width)
        continued = {parents.get(attempt) for attempt in best}
        for beam in beams:
            if beam not in continued:
                self._drop_line(runner, beam, parents, best)
        return best

    @staticmethod
    def _drop_line(
        runner: Runner, beam: Attempt, parents: dict[Attempt, Attempt], best: list[Attempt]
    ) -> None:
        """Drops a beam and those of its ancestors that no remaining beam is nested in."""
        needed = {line for attempt in best for line in _line(attempt, parents)}
        for attempt in _line(beam, parents):
            if attempt in needed:
                break
            runner.drop(attempt)

    @staticmethod
    def _merged(runner: Runner, beams: list[Attempt], parents: dict[Attempt, Attempt]) -> Branch:
        """Merges the best beam into its ancestors, level by level. Returns the topmost branch."""
        line = _line(beams[0], parents)
        for attempt in line[:-1]:
            runner.merge(attempt)
        return line[-1].branch


def _line(attempt: Attempt, parents: dict[Attempt, Attempt]) -> list[Attempt]:
    """Returns the attempt and its ancestors, newest first."""
    line = [attempt]
    while line[-1] in parents:
        line.append(parents[line[-1]])
    return line
