"""`scripts/scores` runs for a quarter of an hour: what it names must be there before that."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]


def test_every_suite_of_the_scores_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOP / "scripts"))
    monkeypatch.delitem(sys.modules, "scores", raising=False)
    import scores  # type: ignore[import-not-found]

    files = []
    for suite in scores.SUITES:
        words = suite.command
        files += [TOP / word for word in words if word.startswith("tests/")]
        if "--test" in words:
            files.append(TOP / "branchfs" / "tests" / words[words.index("--test") + 1])
    assert len(files) > 10
    missing = [f for f in files if not (f.exists() or f.with_suffix(".rs").exists())]
    assert missing == []
