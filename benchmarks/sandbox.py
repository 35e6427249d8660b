#!/usr/bin/env python3
"""What starting a process in a sandbox costs over a bare fork and exec. The goal is 10 ms.

    .venv/bin/python -m benchmarks.sandbox

`true`, started and waited for, many times in turn: by posix_spawn, through BranchContext in a
sandbox, and without one; and a function. Prints minimum, median and maximum, in milliseconds, how
much more each takes than the fork and exec of the same turn, and how many times as much. Then many
sandboxes at once: what one of them takes should stay the same. All depends on what else runs, so
the load is printed too.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

from benchmarks.field.figures import Spread, ratios
from branching import BranchContext

ROUNDS = 60
CROWDS = (1, 10, 30, 100)
CROWD_ROUNDS = 5


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
        bare_each = samples["fork and exec"]
        for name, each in samples.items():
            more = [one - least for one, least in zip(each, bare_each, strict=True)]
            times = ratios(each, bare_each)
            print(
                f"{name:<22} {_told(each)}   over fork and exec {_told(more)}   "
                f"{times.median:5.1f} times as much ({times.minimum:.1f} to {times.maximum:.1f})"
            )
        for size in CROWDS:
            each = [_crowd(size, place) / size for _ in range(CROWD_ROUNDS)]
            print(f"{size:>3} at once, for each    {_told(each)}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


def _crowd(size: int, place: str) -> float:
    """Returns the milliseconds from the first start to the last end."""
    started = time.perf_counter()
    with BranchContext.create([["true"]] * size, [place] * size) as contexts:
        for context in contexts:
            context.wait()
    return (time.perf_counter() - started) * 1000


def _told(milliseconds: list[float]) -> str:
    took = Spread.of(milliseconds)
    return f"min {took.minimum:6.2f}  median {took.median:6.2f}  max {took.maximum:6.2f} ms"


if __name__ == "__main__":
    main()
