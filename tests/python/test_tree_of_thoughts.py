"""TreeOfThoughts: levels of strategies, one winner per level."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM

from branching import TreeOfThoughts, Workspace


def marks(name: str, score: object = True) -> Any:
    """A strategy that leaves a file of that name."""

    def strategy(path: Path) -> object:
        (path / name).write_text(name)
        return (bool(score), score) if isinstance(score, float) else score

    return strategy


def marked(workspace: Workspace) -> list[str]:
    names = {entry.name for entry in workspace.path.iterdir()}
    return sorted(name for name in names - {NAME_FROM} if not name.startswith("@"))


@pytest.mark.contract("4.20")
def test_one_level_commits_the_best(workspace: Workspace) -> None:
    outcome = TreeOfThoughts([marks("a", 0.2), marks("b", 0.7), marks("c", False)])(workspace)
    assert outcome.winner is outcome.all_results[1]
    assert marked(workspace) == ["b"]


def test_evaluate_overrides_the_score(workspace: Workspace) -> None:
    strategies = [marks("a", 0.9), marks("b", 0.1)]
    outcome = TreeOfThoughts(strategies, evaluate=lambda path: (path / "b").exists())(workspace)
    assert outcome.winner is outcome.all_results[1]


@pytest.mark.contract("4.20")
def test_each_level_starts_from_the_winner_of_the_one_before(workspace: Workspace) -> None:
    """The levels happen inside a root branch: main sees nothing before the end."""
    seen: list[tuple[int, list[str], list[str]]] = []

    def expand(path: Path, depth: int) -> list[Any]:
        there = sorted(entry.name for entry in path.iterdir() if entry.name != NAME_FROM)
        seen.append((depth, there, marked(workspace)))
        return [marks(f"a{depth}", 0.1), marks(f"b{depth}", 0.2)]

    outcome = TreeOfThoughts([marks("a", 0.8), marks("b", False)], expand=expand, max_depth=3)(
        workspace
    )
    assert seen == [(1, ["a"], []), (2, ["a", "b1"], [])]
    assert marked(workspace) == ["a", "b1", "b2"]
    assert outcome.winner is outcome.all_results[-1]
    assert [result.branch_index for result in outcome.all_results] == list(range(6))
    assert [result.state for result in outcome.all_results] == [
        *("succeeded", "failed"),
        *("succeeded", "succeeded"),
        *("succeeded", "won"),
    ]


@pytest.mark.contract("4.20", "4.25")
def test_a_level_without_a_winner_drops_everything(workspace: Workspace) -> None:
    outcome = TreeOfThoughts(
        [marks("a")], expand=lambda path, depth: [marks("dead", False)], max_depth=2
    )(workspace)
    assert not outcome.committed
    assert outcome.winner is None
    assert marked(workspace) == []


def test_no_more_strategies_end_the_search_with_what_there_is(workspace: Workspace) -> None:
    outcome = TreeOfThoughts([marks("a")], expand=lambda path, depth: [], max_depth=9)(workspace)
    assert outcome.committed
    assert marked(workspace) == ["a"]


@pytest.mark.contract("4.23")
def test_an_expand_that_raises_ends_the_call_cleanly(workspace: Workspace) -> None:
    def expand(path: Path, depth: int) -> list[Any]:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        TreeOfThoughts([marks("a")], expand=expand, max_depth=2)(workspace)
    assert marked(workspace) == []


@pytest.mark.contract("4.17")
def test_the_timeout_takes_the_best_of_the_level_it_interrupts(workspace: Workspace) -> None:
    def slow(path: Path) -> bool:
        time.sleep(60)
        return True

    started = time.monotonic()
    outcome = TreeOfThoughts(
        [marks("a")],
        expand=lambda path, depth: [slow, marks(f"b{depth}")],
        max_depth=5,
        timeout=1.5,
    )(workspace)
    assert time.monotonic() - started < 30
    assert outcome.committed
    assert marked(workspace) == ["a", "b1"]


@pytest.mark.parametrize(
    ("strategies", "options", "error"),
    [([], {}, ValueError), ([print], {"max_depth": 0}, ValueError)],
    ids=str,
)
def test_invalid_arguments_are_refused(
    strategies: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        TreeOfThoughts(strategies, **options)


def test_an_expand_that_returns_no_list_is_a_type_error(workspace: Workspace) -> None:
    expand: Any = lambda path, depth: None  # noqa: E731
    with pytest.raises(TypeError, match="sequence"):
        TreeOfThoughts([marks("a")], expand=expand, max_depth=2)(workspace)
