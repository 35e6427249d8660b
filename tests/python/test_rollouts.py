"""docs/rollouts.md: its example prints what the page says, and leaves the workspace as it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from support.command import branching

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"


def test_the_example_prints_the_advantages_and_changes_nothing(outside: Path) -> None:
    project = outside / "project"
    project.mkdir()
    (project / "kept.txt").write_text("as it was\n")
    text = PAGE.read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [printed] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=outside, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", printed)
    assert [path.name for path in project.iterdir()] == ["kept.txt"]


def test_the_command_line_scores_a_group_and_drops_it(outside: Path) -> None:
    words = re.findall(r"`branching (best-of-n [^`]*)`", PAGE.read_text())[0].split()
    command = ["-q", "-n", "2", "--", "sh", "-c", "echo 0.$BRANCHING_ATTEMPT >&3; touch new"]
    done = branching(outside, *words, *command)
    assert done.code == 0, done.err
    assert [each["score"] for each in json.loads(done.out)["results"]] == [0.0, 0.1]
    assert not (outside / "new").exists()
    assert branching(outside, "ls").out == ""
