"""How many branches a call has open: those that run and those that lead, not one a candidate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.command import branching

from branching import (
    BeamSearch,
    BestOfN,
    Cascaded,
    Reflexion,
    Speculate,
    Tournament,
    TreeOfThoughts,
    Workspace,
)

N = 20
PARALLEL = 2
RATED_SECONDS = 0.02
"""Long enough for other candidates to end while one is rated."""


class Counted:
    """Candidates and callbacks that note how many branches are open."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.opened: list[int] = []

    def note(self) -> None:
        self.opened.append(len(self._workspace.branches()))

    def fails(self, path: Path) -> bool:
        self.note()
        return False

    def succeeding(self) -> list[Any]:
        def candidate(index: int) -> Callable[[Path], object]:
            def call(path: Path) -> tuple[bool, float]:
                (path / "made").write_text(str(index))
                self.note()
                return True, float(index)

            return call

        return [candidate(index) for index in range(N)]

    def evaluate(self, path: Path) -> float:
        time.sleep(RATED_SECONDS)
        self.note()
        return float((path / "made").read_text())

    def expand(self, path: Path, depth: int) -> list[Any]:
        return self.succeeding()

    def explained(self, path: Path, feedback: list[str]) -> tuple[bool, str]:
        self.note()
        return False, "no"

    def again(self, path: Path, attempt: int, feedback: str | None) -> bool:
        self.note()
        return False


PATTERNS: dict[str, tuple[int, int, Callable[[Counted], Any]]] = {
    # How many calls there are at least, how many branches beside those that run, the pattern.
    "speculate": (N, 0, lambda on: Speculate([on.fails] * N, max_parallel=PARALLEL)),
    "speculate, all": (
        N,
        1,
        lambda on: Speculate(on.succeeding(), first_wins=False, max_parallel=PARALLEL),
    ),
    "best-of-n": (N, 1, lambda on: BestOfN(on.succeeding(), max_parallel=PARALLEL)),
    "best-of-n, rated": (
        2 * N,
        2,  # the one that is rated, and the one that leads
        lambda on: BestOfN(on.succeeding(), evaluate=on.evaluate, max_parallel=PARALLEL),
    ),
    "reflexion": (N, 0, lambda on: Reflexion(on.again, N)),
    "cascaded": (N, 0, lambda on: Cascaded(on.explained, fan_out=[1, N], max_parallel=PARALLEL)),
    "tournament": (
        N,
        0,
        lambda on: Tournament([on.fails] * N, judge=lambda a, b: 0, max_parallel=PARALLEL),
    ),
    "beam-search": (
        4 * N,
        2 + 1 + 2,  # the beams of the next level, the one that is rated, their parents
        lambda on: BeamSearch(
            on.succeeding(),
            expand=on.expand,
            evaluate=on.evaluate,
            beam_width=2,
            max_parallel=PARALLEL,
        ),
    ),
    "tree-of-thoughts": (
        4 * N,
        1 + 1 + 1,  # the best, the one that is rated, the root
        lambda on: TreeOfThoughts(
            on.succeeding(),
            expand=on.expand,
            evaluate=on.evaluate,
            max_depth=2,
            max_parallel=PARALLEL,
        ),
    ),
}


@pytest.mark.contract("4.14")
@pytest.mark.parametrize(("calls", "beside", "make"), PATTERNS.values(), ids=PATTERNS)
def test_no_more_branches_are_open_than_run_and_may_win(
    workspace: Workspace, calls: int, beside: int, make: Callable[[Counted], Any]
) -> None:
    counted = Counted(workspace)
    make(counted)(workspace)
    assert len(counted.opened) >= calls
    assert max(counted.opened) <= PARALLEL + beside
    assert workspace.branches() == []


def test_a_command_opens_no_more_branches_than_run_and_lead(real: Mounted) -> None:
    """The branch log has a line for each branch that begins, and one for each that ends."""
    words = ["best-of-n", "-n", str(N), "--parallel", str(PARALLEL)]
    done = branching(real.root, *words, "--", "sh", "-c", "echo >made")
    assert done.code == 0, done.err
    opened: set[int] = set()
    numbers: set[int] = set()
    most = 0
    for line in (real.base / ".branching/branches/log").read_bytes().splitlines():
        record = json.loads(line)
        if "name" in record:
            opened.add(record["id"])
        opened.discard(record.get("gone"))
        numbers |= opened
        most = max(most, len(opened))
    assert (len(numbers), opened) == (N, set())
    assert most <= PARALLEL + 1


def test_speculate_without_first_wins_keeps_the_first_success_in_order(
    workspace: Workspace,
) -> None:
    """Whichever ends first: later ones are dropped once an earlier one succeeded."""
    order: list[int] = []

    def candidate(index: int) -> Callable[[Path], bool]:
        def call(path: Path) -> bool:
            (path / "made").write_text(str(index))
            while index == 1 and 3 not in order:
                time.sleep(0.01)
            order.append(index)
            return index != 0

        return call

    candidates = [candidate(index) for index in range(4)]
    outcome = Speculate(candidates, first_wins=False)(workspace)
    assert order.index(3) < order.index(1)
    assert outcome.winner is outcome.all_results[1]
    assert (workspace.path / "made").read_text() == "1"
    states = ["failed", "won", "succeeded", "succeeded"]
    assert [result.state for result in outcome.all_results] == states


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one by one", "concurrently"])
def test_a_tournament_drops_each_loser_before_the_next_round(
    workspace: Workspace, is_parallel: bool
) -> None:
    """All successes are open until they are judged, as pairs are made of all of them."""
    counted = Counted(workspace)

    def judge(a: Path, b: Path) -> int:
        counted.note()
        return 0

    candidates = [lambda path: True] * 8
    Tournament(candidates, judge=judge, parallel_judges=is_parallel)(workspace)
    rounds = [counted.opened[:4], counted.opened[4:6], counted.opened[6:]]
    if is_parallel:
        assert list(map(max, rounds)) == [8, 4, 2]
    else:
        assert rounds == [[8, 7, 6, 5], [4, 3], [2]]
    assert workspace.branches() == []
