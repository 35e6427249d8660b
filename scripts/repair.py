#!/usr/bin/env -S python3 -B
"""Stands in for a model in `scripts/demo`: guesses what the broken line should say, and lets the project's tests judge.

repair.py tests        runs the project's tests; succeeds if all pass
repair.py wrong        a guess that does not even fail everywhere
repair.py damage       removes the tests and ruins the sources, so that nothing is left to fail
repair.py hang         never ends, and leaves a process of its own behind
repair.py right        the right guess, after a while
repair.py score        guess number BRANCHING_ATTEMPT; the share of tests that pass goes to file descriptor 3
repair.py learn        the first guess that BRANCHING_FEEDBACK does not rule out
repair.py critique     says what became of the guess in this branch, and so what the next attempt need not try
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path("src/cachetools/__init__.py")
TRIED = Path("tried.txt")
RIGHT = "next(iter(self.__order))"
GUESSES = ("max(self.__order)", "next(reversed(self.__order))", RIGHT, "list(self.__order)[1]")
# No other process sleeps for so odd a time, so that `scripts/demo` would recognise a survivor.
SLEEP = ("sleep", "600.25")


def write_guess(expression: str) -> None:
    """Rewrites the line of LRUCache.popitem that picks the entry to drop."""
    head, of_class, rest = SOURCE.read_text().partition("class LRUCache(")
    body, of_line, tail = rest.partition("            key = ")
    SOURCE.write_text(head + of_class + body + of_line + expression + tail[tail.index("\n") :])


def run_tests() -> tuple[float, str]:
    """Returns the share of the project's tests that pass, and one line about them."""
    tests = [sys.executable, "-B", "-W", "ignore", "-m", "unittest"]
    ended = subprocess.run(tests, env=os.environ | {"PYTHONPATH": "src"}, stderr=subprocess.PIPE, text=True)
    report = ended.stderr.strip().splitlines()
    total = next(int(line.split()[1]) for line in reversed(report) if line.startswith("Ran "))
    wrong = [line for line in report if line.startswith(("FAIL:", "ERROR:"))]
    if ended.returncode and not wrong:
        return 0.0, report[-1]
    first = f", first {wrong[0]}" if wrong else ""
    return (total - len(wrong)) / total, f"{total - len(wrong)} of {total} tests pass{first}"


def judge(guess: str) -> float:
    """Tries a guess, says how it went, and returns the share of tests that pass."""
    write_guess(guess)
    share, verdict = run_tests()
    print(f"key = {guess}: {verdict}", flush=True)
    return share


def learn() -> int:
    """Tries what the feedback has not ruled out, and notes for the critique what was tried."""
    ruled_out = [line for line in os.environ["BRANCHING_FEEDBACK"].splitlines() if line.startswith("tried ")]
    guess = next(candidate for candidate in GUESSES if f"tried {candidate}" not in ruled_out)
    if judge(guess) == 1:
        return 0
    TRIED.write_text("".join(f"{line}\n" for line in [*ruled_out, f"tried {guess}"]))
    return 1


def damage() -> int:
    """Does what a candidate must never be able to do to anyone but itself."""
    for directory in ("tests", "docs"):
        shutil.rmtree(directory)
    for path in Path().rglob("*.*"):
        if path.is_file() and path.name != Path(__file__).name:
            path.write_text("ruined\n")
    print("tests and docs removed, everything else overwritten", flush=True)
    return 0 if run_tests()[0] == 1 else 1


def main() -> int:
    mode = sys.argv[1]
    if mode == "wrong":
        return 0 if judge(GUESSES[0]) == 1 else 1
    if mode == "right":
        time.sleep(2)
        return 0 if judge(RIGHT) == 1 else 1
    if mode == "damage":
        return damage()
    if mode == "hang":
        print("sleeping for ten minutes, twice", flush=True)
        subprocess.Popen(SLEEP, start_new_session=True)
        return subprocess.call(SLEEP)
    if mode == "score":
        os.write(3, f"{judge(GUESSES[int(os.environ['BRANCHING_ATTEMPT'])]):.4f}".encode())
        return 0
    if mode == "learn":
        return learn()
    share, verdict = run_tests()
    print(TRIED.read_text() + verdict if mode == "critique" else verdict)
    return 0 if share == 1 or mode == "critique" else 1


if __name__ == "__main__":
    sys.exit(main())
