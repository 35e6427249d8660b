"""The programs of docs/agents.md run, each by itself, in an ordinary directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_origin

import pytest
from support.branchfs import find_program

import branching.agent

DOCUMENT = Path(__file__).parents[3] / "docs" / "agents.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.M | re.S)
PROGRAM_SECONDS_MAX = 100


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_every_program_runs(place: Path, program: str) -> None:
    project = place / "project"
    project.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=project,
        env={**os.environ, "BRANCHFS": find_program()},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_all_blocks_are_programs_or_pictures() -> None:
    fences = re.findall(r"^```(\w*)$", DOCUMENT.read_text(), re.M)
    assert set(fences) == {"text", "python", ""}
    assert fences.count("python") == len(PROGRAMS) == 3


def test_every_public_name_is_there_and_loads_no_model() -> None:
    assert sorted(branching.agent._HOME) == branching.agent.__all__
    for name in branching.agent.__all__:
        value = getattr(branching.agent, name)
        assert get_origin(value) is Literal or value.__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = branching.agent.Nothing
    script = "import sys, branching.agent.coordinator; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "pydantic" not in done.stdout
