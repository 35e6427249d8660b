"""Rows of docs/contract.md that are not about one module: signatures, results, the backend."""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted

import branching
from branching import BeamSearch, Speculate, SpeculationOutcome, SpeculationResult, Workspace

OPTIONS = {
    "isolate_processes": False,
    "resource_limits": None,
    "group_limits": None,
    "max_parallel": None,
    "commit": True,
    "runner": None,
    "on_event": None,
}
"""What each of the seven takes besides its own."""

CONSTRUCTORS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "Speculate": (["candidates"], {"first_wins": True, "timeout": None}),
    "BestOfN": (
        ["candidates_or_task", "n"],
        {"scores": None, "evaluate": None, "timeout": None},
    ),
    "Reflexion": (["task"], {"max_retries": 3, "critique": None}),
    "TreeOfThoughts": (
        ["strategies"],
        {"evaluate": None, "expand": None, "max_depth": 1, "timeout": None},
    ),
    "BeamSearch": (
        ["strategies"],
        {
            "expand": inspect.Parameter.empty,
            "evaluate": None,
            "beam_width": 3,
            "max_depth": 2,
            "timeout": None,
        },
    ),
    "Tournament": (
        ["candidates_or_task", "n"],
        {"judge": inspect.Parameter.empty, "timeout": None},
    ),
    "Cascaded": (["task"], {"fan_out": (1, 2, 4), "timeout": None, "wave_timeout": None}),
}


@pytest.mark.contract("0.5", "0.6")
def test_fstype_names_the_detected_backend(mount: Mounted) -> None:
    space = Workspace(mount.root)
    assert space.fstype in ("branchfs", "overlay", "daxfs")
    space.close()


@pytest.mark.contract("2.18")
def test_a_branch_costs_the_same_for_any_size_of_the_base(real: Mounted) -> None:
    """The store grows by the same amount for one file and for a thousand, and an abort leaves
    nothing."""

    def entries() -> int:
        found = 0
        for _, directories, files in os.walk(real.base / ".branching"):
            # The daemon empties the trash in the background.
            directories[:] = [name for name in directories if name != "trash"]
            found += len(directories) + len(files)
        return found

    def grown() -> int:
        before = entries()
        with Workspace(real.root) as space, space.branch("b", on_success=None) as branch:
            after = entries()
            branch.abort()
        return after - before

    few = grown()
    for number in range(1_000):
        (real.base / f"file-{number}").write_text("x")
    assert grown() == few


@pytest.mark.contract("4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "4.7")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_have_the_published_parameters(name: str) -> None:
    positional, keywords = CONSTRUCTORS[name]
    signature = inspect.signature(getattr(branching, name)).parameters
    plain = inspect.signature(branching.patterns.base.Pattern).parameters
    for parameter in positional:
        assert signature[parameter].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    for parameter, default in keywords.items():
        if parameter != "max_retries":
            assert signature[parameter].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature[parameter].default == default
    for parameter, default in OPTIONS.items():
        assert plain[parameter].default == default


@pytest.mark.contract("0.3", "3.16", "3.18", "4.8")
@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_each_pattern_takes_the_common_options(name: str) -> None:
    """Unknown options are refused."""
    first: Any = print if name in ("Reflexion", "Cascaded") else [print]
    needed = {
        parameter: print
        for parameter, default in CONSTRUCTORS[name][1].items()
        if default is inspect.Parameter.empty
    }
    pattern = getattr(branching, name)
    for how in ({"isolate_processes": True, "max_parallel": 2}, {"runner": print}):
        assert callable(pattern(first, **needed, **{**OPTIONS, **how}))
    with pytest.raises(TypeError, match="no_such_option"):
        pattern(first, **needed, no_such_option=1)


@pytest.mark.contract("3.1", "3.2")
def test_a_branch_context_has_the_published_parameters() -> None:
    signature = inspect.signature(branching.BranchContext).parameters
    assert list(signature)[:2] == ["target", "workspace"]
    options = {"close_fds": False, "limits": None, "isolate": False, "parent_cgroup": None}
    for parameter, default in options.items():
        assert signature[parameter].kind is inspect.Parameter.KEYWORD_ONLY
        assert signature[parameter].default == default


@pytest.mark.contract("4.30", "4.31")
def test_results_have_the_published_fields() -> None:
    outcome = {field.name: field for field in dataclasses.fields(SpeculationOutcome)}
    assert {"committed", "winner", "all_results"} <= set(outcome)
    result = {field.name: field.default for field in dataclasses.fields(SpeculationResult)}
    wanted = {"branch_index", "success", "return_value", "exception", "branch_path"}
    assert wanted <= set(result)
    assert (result["score"], result["exit_code"]) == (0.0, 0)


@pytest.mark.contract("4.33")
def test_the_winner_is_one_of_all_results(workspace: Workspace) -> None:
    """Also in a search by levels."""

    def makes(path: Path) -> bool:
        (path / path.name).write_text("x")
        return True

    for pattern in (
        Speculate([makes, makes]),
        BeamSearch([makes, makes], expand=lambda path, depth: [makes]),
    ):
        outcome = pattern(workspace)
        assert any(outcome.winner is result for result in outcome.all_results)
