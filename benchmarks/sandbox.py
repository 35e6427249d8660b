#!/usr/bin/env python3
"""What starting a process in a sandbox costs over a bare fork and exec. The goal is 10 ms.

    .venv/bin/python benchmarks/sandbox.py

`true`, started and waited for, many times in turn: by posix_spawn, through BranchContext in a
sandbox, and without one; and a function. Prints minimum, median and maximum, in milliseconds.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from benchmarks.field.figures import Spread
from branching import BranchContext

ROUNDS = 60


def bare() -> None:
    pid = os.posix_spawnp("true", ["true"], os.environ)
    os.waitpid(pid, 0)


def main() -> None:
    with tempfile.TemporaryDirectory() as place:

        def sandboxed() -> None:
            with BranchContext(["true"], place) as context:
                context.wait()

        def plain() -> None:
            with BranchContext(["true"], place, isolation="none") as context:
                context.wait()

        def function() -> None:
            with BranchContext(bool, place) as context:
                context.wait()

        ways: dict[str, Callable[[], None]] = {
            "fork and exec": bare,
            "no sandbox": plain,
            "sandbox": sandboxed,
            "function in a sandbox": function,
        }
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS + 1):
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                if turn:  # the first one starts the server
                    samples[name].append((time.perf_counter() - started) * 1000)
        for name, each in samples.items():
            took = Spread.of(each)
            print(
                f"{name:<22} min {took.minimum:6.2f} ms  median {took.median:6.2f}  "
                f"max {took.maximum:6.2f}"
            )


if __name__ == "__main__":
    main()
