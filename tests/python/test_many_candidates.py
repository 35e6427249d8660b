"""Hundreds of concurrent candidates leave nothing behind (the fixtures check)."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching_argv

from branching import BestOfN, Reflexion, Speculate, Workspace
from branching.patterns.command_candidate import Program, shell

pytestmark = pytest.mark.slow

MANY = 200
MANY_PROCESSES = 60


def test_hundreds_race_and_one_wins(workspace: Workspace) -> None:
    """All succeed at the same time: one is committed, the others are stale or dropped."""
    start = threading.Barrier(MANY, timeout=100)

    def candidate(path: Path, attempt: int) -> bool:
        (path / "made").write_text(str(attempt))
        start.wait()
        return True

    outcome = Speculate([partial(candidate, attempt=number) for number in range(MANY)])(workspace)
    assert outcome.winner
    assert len(outcome.all_results) == MANY
    assert (workspace.path / "made").read_text() == str(outcome.winner.branch_index)
    assert [result.state for result in outcome.all_results].count("won") == 1


def test_the_best_of_hundreds_is_found(real_workspace: Workspace) -> None:
    """The order in which they end does not matter."""
    scores = random.Random(7).sample(range(MANY), MANY)

    def candidate(path: Path, attempt: int) -> tuple[bool, float]:
        (path / "made").write_text(str(attempt))
        return True, scores[attempt]

    outcome = BestOfN(candidate, MANY, max_parallel=32)(real_workspace)
    best = scores.index(MANY - 1)
    assert outcome.winner is outcome.all_results[best]
    assert (real_workspace.path / "made").read_text() == str(best)


def test_many_commands_race(real_workspace: Workspace) -> None:
    def program(text: str) -> Program:
        return Program(shell(text), workspace=real_workspace.root, owner=None)

    candidates = [program("sleep 300 & sleep 300") for _ in range(MANY_PROCESSES)]
    candidates[MANY_PROCESSES // 2] = program("echo won > made")
    outcome = Speculate(candidates)(real_workspace)
    assert outcome.winner is outcome.all_results[MANY_PROCESSES // 2]
    assert (real_workspace.path / "made").read_text() == "won\n"


def test_a_race_needs_no_higher_limit_of_open_files_than_is_usual(real: Mounted) -> None:
    """Seven a command are more than the limit here; a candidate has the caller's all the same."""
    words = [*("-c", "ulimit -n; sleep 300") * (MANY_PROCESSES - 1), "-c", "ulimit -n >made"]
    program = shlex.join(branching_argv("speculate", "--json", "--parallel", "60", *words))
    done = subprocess.run(
        ["sh", "-c", f"ulimit -S -n 200; exec {program}"],
        cwd=real.root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    ended_otherwise = [each for each in results if each["state"] not in ("cancelled", "won")]
    assert ended_otherwise == []
    assert (real.root / "made").read_text() == "200\n"


def test_a_hundred_attempts_one_after_the_other(workspace: Workspace) -> None:
    def task(path: Path, attempt: int, feedback: str | None) -> bool:
        return attempt == 99

    assert Reflexion(task, 100)(workspace).committed
