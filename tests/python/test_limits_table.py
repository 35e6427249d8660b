"""docs/limits.md: which limit works where, held against the code of this machine's version."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from support.groups import MIB, version

from branching import ProcessBranchError, ResourceLimits
from branching.process.cgroup import Cgroup, discovery

DOCUMENT = Path(__file__).parents[2] / "docs" / "limits.md"
VALUES = {
    "memory": ResourceLimits(memory=64 * MIB),
    "oom_group": ResourceLimits(memory=64 * MIB, oom_group=True),
    "memory_high": ResourceLimits(memory_high=64 * MIB),
    "cpu": ResourceLimits(cpu=0.5),
    "pids": ResourceLimits(pids=50),
    "disk": ResourceLimits(disk=MIB),
    "wall_time": ResourceLimits(wall_time=60.0),
}


def table() -> dict[str, dict[str, str]]:
    """Returns the table of limits in the document, by column."""
    text = DOCUMENT.read_text().split("## Which limit works where\n", 1)[1].strip().split("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in text.splitlines()]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def is_enforced(limits: ResourceLimits) -> bool:
    if not limits.needs_cgroup:
        return True  # by BranchFS, or by the clock
    try:
        Cgroup.create(limits).remove()
    except ProcessBranchError as error:
        if "cannot be enforced" not in str(error):
            raise
        return False
    return True


def test_every_limit_is_in_the_table() -> None:
    assert set(table()) == set(VALUES) == {field.name for field in fields(ResourceLimits)}


@pytest.mark.parametrize("name", VALUES)
def test_it_is_so_on_this_machine(name: str) -> None:
    said = table()[name][f"version {version()}"]
    assert {True: "yes", False: "refused"}[is_enforced(VALUES[name])] == said


@pytest.mark.parametrize("name", VALUES)
def test_it_is_so_without_control_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "find_own", dict)
    said = table()[name]["no control groups"]
    assert {True: "yes", False: "refused"}[is_enforced(VALUES[name])] == said
