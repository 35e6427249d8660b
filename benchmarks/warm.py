#!/usr/bin/env python3
"""How long a command in a warm container takes, beside `docker exec` there: at most 1.3 times.

    .venv/bin/python benchmarks/warm.py

Needs Docker and the image. Each way is taken in turn, many times, and compared by its median.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 40
WRAPPER = str(Path(sys.executable).parent / "branching-docker")


def seconds(command: list[str]) -> float:
    """Returns how long a command takes that succeeds."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    # As installed: the modules are compiled once, not by each command.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as project:
        os.chown(project, 1000, 1000)
        wrapper = [WRAPPER, "-w", project]
        up = subprocess.run([*wrapper, "up"], check=True, stdout=subprocess.PIPE, text=True)
        name = up.stdout.strip()
        try:
            ways = {
                "docker exec": ["docker", "exec", "--interactive", name, "true"],
                "exec": [*wrapper, "exec", "true"],
                "-e exec": [WRAPPER, "-e", "A=1", "-w", project, "exec", "true"],
                "run": [*wrapper, "run", "--", "true"],
            }
            took: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(ROUNDS):
                for way, command in ways.items():
                    took[way].append(seconds(command))
        finally:
            subprocess.run([*wrapper, "down"], check=True, stdout=subprocess.DEVNULL)
    least = statistics.median(took["docker exec"])
    for way, times in took.items():
        median = statistics.median(times)
        print(f"{way:<12} {median * 1000:6.1f} ms  {median / least:4.2f}")


if __name__ == "__main__":
    main()
