"""`scripts/scores` runs for a quarter of an hour: what it names must be there before that."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOP = Path(__file__).parents[2]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOP / "scripts"))
    monkeypatch.delitem(sys.modules, "scores", raising=False)
    return import_module("scores")


def test_a_run_that_was_interrupted_goes_on_where_it_was(
    scores: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def suite(driver: str, script: str) -> Any:
        command = ["sh", "-c", f"cd {tmp_path}; echo {driver} >>ran; {script}"]
        return scores.Suite("a suite", driver, command, r"(\d+) passed", "{} tests")

    ends = suite("FUSE", "echo 3 passed")
    kept = tmp_path / "kept.json"
    with pytest.raises(SystemExit, match="a suite, overlay: failed"):
        scores.run_suites([ends, suite("overlay", "exit 1")], kept)
    found = scores.run_suites([ends, suite("overlay", "echo 4 passed")], kept)
    assert [score for _, score in found] == ["3 tests", "4 tests"]
    assert (tmp_path / "ran").read_text().split() == ["FUSE", "overlay", "overlay"]


def test_every_suite_of_the_scores_is_there(scores: ModuleType) -> None:
    files = []
    for suite in scores.SUITES:
        words = suite.command
        files += [TOP / word for word in words if word.startswith("tests/")]
        if "--test" in words:
            files.append(TOP / "branchfs" / "tests" / words[words.index("--test") + 1])
    assert len(files) > 10
    missing = [f for f in files if not (f.exists() or f.with_suffix(".rs").exists())]
    assert missing == []
