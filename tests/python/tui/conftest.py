"""Fixtures of the tests of the terminal's faces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching import Workspace

if TYPE_CHECKING:
    from conftest import Mounted

    from .room import Room


@pytest.fixture
def room(real: Mounted, place: Path) -> Iterator[Room]:
    """A chat on a real workspace, in which no branch is left."""
    from .room import Room

    with Workspace(real.root) as space:
        yield Room(space, place / "settings" / "chat.json")
        assert space.branches() == []
