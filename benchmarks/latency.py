#!/usr/bin/env python3
"""How long after its winner's last instruction a race returns. The goal is 50 ms.

    BRANCHFS=branchfs/target/release/branchfs .venv/bin/python benchmarks/latency.py

Three races, many times each: functions in threads that would go on for a minute, functions in
processes, and commands that ignore SIGTERM and have children. The winner notes the time itself as
the last thing it does, so that its own end, the losers', the commit and all tidying up count.
Prints minimum, median and maximum, in milliseconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.field.figures import Spread
from branching import Speculate, Workspace
from branching.patterns.command_candidate import Program, shell

ROUNDS = 20
STUBBORN = "trap '' TERM; sleep 60 & sleep 60; sleep 60"
WINS = "sleep 0.2; echo x > won; date +%s.%N > ended"


def loser(_: Path) -> bool:
    time.sleep(60)
    return True


def winner(path: Path) -> bool:
    time.sleep(0.2)
    (path / "ended").write_text(f"{time.time():f}")
    return True


def race(workspace: Workspace, pattern: Speculate) -> float:
    """Returns the milliseconds between the end of the winner and that of the call."""
    outcome = pattern(workspace)
    now = time.time()
    assert outcome.committed
    return (now - float((workspace.path / "ended").read_text())) * 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as base, Workspace.mount(base) as workspace:

        def program(text: str) -> Program:
            return Program(shell(text), workspace=workspace.root, owner=None)

        functions: list[Callable[[Path], object]] = [loser, winner, loser, loser]
        commands = [program(STUBBORN), program(WINS), program(STUBBORN), program(STUBBORN)]
        races = {
            "functions": Speculate(functions),
            "functions in processes": Speculate(functions, isolate_processes=True),
            "commands": Speculate(commands),
        }
        for name, pattern in races.items():
            took = Spread.of([race(workspace, pattern) for _ in range(ROUNDS)])
            print(
                f"{name:<23} min {took.minimum:6.1f} ms  median {took.median:6.1f}  "
                f"max {took.maximum:6.1f}"
            )


if __name__ == "__main__":
    main()
