"""docs/session.md: its first example does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "session.md"


def test_the_first_example_runs(outside: Path) -> None:
    project = outside / "project"
    project.mkdir()
    (project / "words.txt").write_text("a b b c c c\n")
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=outside, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['b', 'c']\n"
    assert (project / "report.txt").read_text() == "limit 2: 2 words\n"
    names = sorted(path.name for path in project.iterdir())
    assert names == [".branching", "report.txt", "words.txt"]


def test_the_example_with_a_data_frame_and_a_model_runs(outside: Path) -> None:
    project = outside / "project"
    project.mkdir()
    rows = [f"{a},{b},{int(a * b % 7 > 3)}" for a in range(20) for b in range(20)]
    (project / "measurements.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [code] = [block for block in blocks if "pandas" in block]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=outside,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    best, trees = map(int, done.stdout.split())
    assert trees == 10**best
    names = sorted(path.name for path in project.iterdir())
    assert names == [".branching", "measurements.csv", "model.pickle"]
