"""BeamSearch: the best few of each level."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from test_tree_of_thoughts import marked, marks

from branching import BeamSearch, Workspace


def nothing_more(path: Path, depth: int) -> list[Any]:
    return []


def test_one_level_commits_the_best(workspace: Workspace) -> None:
    outcome = BeamSearch([marks("a", 0.2), marks("b", 0.7)], expand=nothing_more, max_depth=1)(
        workspace
    )
    assert outcome.winner is outcome.all_results[1]
    assert marked(workspace) == ["b"]


@pytest.mark.contract("4.21")
def test_only_the_beams_are_expanded_and_in_their_own_branches(workspace: Workspace) -> None:
    seen: list[tuple[int, str]] = []

    def expand(path: Path, depth: int) -> list[Any]:
        name = next(entry.name for entry in path.glob("[abc]"))
        seen.append((depth, name))
        return [marks(f"{name}1", 0.5)]

    BeamSearch(
        [marks("a", 0.1), marks("b", 0.8), marks("c", 0.9)],
        expand=expand,
        beam_width=2,
        max_depth=2,
    )(workspace)
    assert sorted(seen) == [(1, "b"), (1, "c")]


@pytest.mark.contract("4.21")
def test_the_weaker_beam_can_win_and_brings_all_it_is_built_on(workspace: Workspace) -> None:
    def expand(path: Path, depth: int) -> list[Any]:
        if (path / "strong").exists():
            return [marks(f"s{depth}", 0.1 * depth)]
        return [marks(f"w{depth}", 0.3 * depth)]

    outcome = BeamSearch(
        [marks("strong", 0.9), marks("weak", 0.5)], expand=expand, beam_width=2, max_depth=4
    )(workspace)
    assert marked(workspace) == ["w1", "w2", "w3", "weak"]
    assert outcome.winner is not None
    assert outcome.winner.score == pytest.approx(0.9)
    assert any(outcome.winner is result for result in outcome.all_results)


@pytest.mark.contract("4.21")
def test_all_of_a_level_are_ranked_together(workspace: Workspace) -> None:
    """Both survivors may come from one beam; the other beam ends, with its branch."""
    alive: list[list[str]] = []

    def expand(path: Path, depth: int) -> list[Any]:
        alive.append(sorted(record.name for record in workspace.branches()))
        if (path / "a").exists():
            return [marks(f"x{depth}", 0.9), marks(f"y{depth}", 0.8)]
        return [marks(f"z{depth}", 0.1)]

    outcome = BeamSearch(
        [marks("a", 0.5), marks("b", 0.6)], expand=expand, beam_width=2, max_depth=3
    )(workspace)
    assert outcome.committed
    assert marked(workspace) == ["a", "x1", "x2"]
    assert [len(names) for names in alive] == [2, 2, 3, 3]  # never more than the beams need


def test_a_beam_whose_children_all_fail_is_dropped(workspace: Workspace) -> None:
    def expand(path: Path, depth: int) -> list[Any]:
        return [marks("good", 0.1) if (path / "a").exists() else marks("bad", False)]

    outcome = BeamSearch([marks("a", 0.5), marks("b", 0.9)], expand=expand)(workspace)
    assert outcome.committed
    assert marked(workspace) == ["a", "good"]


@pytest.mark.contract("4.25")
def test_a_level_without_success_drops_everything(workspace: Workspace) -> None:
    outcome = BeamSearch(
        [marks("a"), marks("b")], expand=lambda path, depth: [marks("bad", False)]
    )(workspace)
    assert not outcome.committed
    assert marked(workspace) == []


def test_nothing_more_to_try_commits_the_best_beam(workspace: Workspace) -> None:
    outcome = BeamSearch([marks("a", 0.1), marks("b", 0.9)], expand=nothing_more)(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert marked(workspace) == ["b"]


@pytest.mark.contract("4.23")
def test_an_expand_that_raises_ends_the_call_cleanly(workspace: Workspace) -> None:
    """The published package hangs forever."""

    def expand(path: Path, depth: int) -> list[Any]:
        if depth == 2:
            raise LookupError("mine")
        return [marks("deeper")]

    with pytest.raises(LookupError, match="mine"):
        BeamSearch([marks("a"), marks("b")], expand=expand, max_depth=3)(workspace)
    assert marked(workspace) == []


@pytest.mark.contract("4.17")
def test_the_timeout_takes_the_best_of_the_level_it_interrupts(workspace: Workspace) -> None:
    def slow(path: Path) -> bool:
        time.sleep(60)
        return True

    started = time.monotonic()
    outcome = BeamSearch(
        [marks("a")], expand=lambda path, depth: [slow, marks(f"b{depth}")], timeout=1.5
    )(workspace)
    assert time.monotonic() - started < 30
    assert outcome.committed
    assert marked(workspace) == ["a", "b1"]


@pytest.mark.parametrize("options", [{"beam_width": 0}, {"max_depth": 0}], ids=str)
def test_invalid_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        BeamSearch([print], expand=nothing_more, **options)
