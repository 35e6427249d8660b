"""Fixtures of the tests that run in virtual machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Mounted, _leaves_nothing, daxfs, place, scratch

from branching import Workspace

__all__ = ["_leaves_nothing", "daxfs", "place", "scratch"]


@pytest.fixture
def space(daxfs: Mounted) -> Iterator[Workspace]:
    """A workspace on DaxFS. A branch still open at the end fails the test."""
    with Workspace(daxfs.root) as space:
        yield space
        assert not (left := [record.name for record in space.branches()]), f"left open: {left}"
