#!/usr/bin/env python3
"""How long after its winner has ended a race returns. The goal is 50 ms.

    BRANCHFS=branchfs/target/release/branchfs .venv/bin/python benchmarks/latency.py

Two races, many times each: plain functions that would go on for a minute, and commands that ignore
SIGTERM and have children. Prints median, 95th percentile and worst, in milliseconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from branching import Event, Speculate, Workspace
from branching.patterns.program import Program, shell

ROUNDS = 30
STUBBORN = "trap '' TERM; sleep 60 & sleep 60; sleep 60"


def race(workspace: Workspace, candidates: list[Callable[[Path], object]]) -> float:
    """Returns the seconds between the end of the winner and that of the call."""
    ends: list[float] = []

    def listen(event: Event) -> None:
        if event.kind == "finished" and event.state == "succeeded":
            ends.append(time.monotonic())

    Speculate(candidates, on_event=listen)(workspace)
    return time.monotonic() - ends[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as base, Workspace.mount(base) as workspace:

        def program(text: str) -> Program:
            return Program(shell(text), workspace=workspace.root, owner=None)

        def loser(_: Path) -> bool:
            time.sleep(60)
            return True

        races: dict[str, list[Callable[[Path], object]]] = {
            "functions": [loser, lambda _: True, loser, loser],
            "commands": [program(STUBBORN), program("sleep 0.2; echo x > won"), program(STUBBORN)],
        }
        for name, candidates in races.items():
            took = sorted(race(workspace, candidates) * 1000 for _ in range(ROUNDS))
            late = took[int(ROUNDS * 0.95)]
            middle = statistics.median(took)
            print(f"{name:<10} median {middle:6.1f} ms  95 % {late:6.1f}  worst {took[-1]:6.1f}")


if __name__ == "__main__":
    main()
