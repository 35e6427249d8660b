"""The logs of candidates: which are kept, and which make room for new ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from branching.patterns import logbook
from branching.patterns.event import Event
from branching.patterns.logbook import Logbook, read_entries


def begun(log: Logbook, branch: str) -> None:
    log.and_then(lambda _: None)(Event(kind="started", index=0, branch=branch, label=branch))


def ended(log: Logbook, branch: str) -> None:
    event = Event(kind="finished", index=0, branch=branch, label=branch, state="failed")
    log.and_then(lambda _: None)(event)


def test_logs_of_calls_under_way_are_kept_and_the_limit_holds_within_a_call(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logbook, "ENTRIES_MAX", 5)
    owner = (os.getuid(), os.getgid())
    with Logbook(place, owner, "speculate") as race, Logbook(place, owner, "speculate") as later:
        begun(race, "running-0")
        for number in range(12):
            begun(later, f"later-{number}")
            ended(later, f"later-{number}")
        kept = [entry.branch for entry in read_entries(place / "logs")]
        assert sorted(kept) == ["later-10", "later-11", "later-8", "later-9", "running-0"]
        assert {path.stem for path in (place / "logs").glob("*.log")} == set(kept)
