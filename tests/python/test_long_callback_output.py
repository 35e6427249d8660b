"""Commands as callbacks whose output is longer than any answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from branching.patterns import command_candidate
from branching.patterns.command_candidate import Reader, shell


def test_of_a_long_answer_the_end_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_candidate, "ANSWER_BYTES_MAX", 1000)
    script = shell("echo begin; head -c 1000000 /dev/zero | tr '\\0' x; echo end")
    answer = Reader(script, workspace=place, owner=None)(place)
    assert len(answer) == 1000 - len("\n")
    assert answer.endswith("xend")


def test_an_answer_of_ordinary_length_is_whole(place: Path) -> None:
    answer = Reader(shell("seq 20000"), workspace=place, owner=None)(place)
    assert answer.split() == [str(number) for number in range(1, 20001)]
