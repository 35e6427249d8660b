"""Fixtures of the terminal UI tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching import Workspace

if TYPE_CHECKING:
    from conftest import Mounted

    from .chat_harness import ChatHarness


@pytest.fixture
def harness(real: Mounted, place: Path) -> Iterator[ChatHarness]:
    """A chat on a real workspace; the test fails if it leaves a branch."""
    from .chat_harness import ChatHarness

    with Workspace(real.root) as space:
        yield ChatHarness(space, place / "settings" / "chat.json")
        assert space.branches() == []
