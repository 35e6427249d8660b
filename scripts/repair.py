"""Stands in for a model in `scripts/demo`: guesses what the broken line should say, then lets the project's tests judge.

    repair.py --score      guess number BRANCHING_ATTEMPT; the share of tests that pass goes to file descriptor 3
    repair.py              the first guess that BRANCHING_FEEDBACK does not rule out; succeeds if all tests pass
    repair.py --critique   says what became of the guess in this branch, and so what the next attempt need not try
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path("src/cachetools/__init__.py")
TRIED = Path("tried.txt")
CLASS, METHOD = "class LRUCache(", "def popitem("
GUESSES = ("max(self.__order)", "next(reversed(self.__order))", "next(iter(self.__order))", "list(self.__order)[1]")
TESTS = ("python3", "-B", "-m", "unittest")


def write_guess(expression: str) -> None:
    """Rewrites the line of LRUCache.popitem that picks the key to drop."""
    lines = SOURCE.read_text().splitlines(keepends=True)
    position = next(number for number, line in enumerate(lines) if line.startswith(CLASS))
    position = next(number for number in range(position, len(lines)) if METHOD in lines[number])
    position = next(number for number in range(position, len(lines)) if "key = " in lines[number])
    lines[position] = f"            key = {expression}\n"
    SOURCE.write_text("".join(lines))


def run_tests() -> tuple[float, str]:
    """Returns the share of the project's tests that pass, and the last line they print."""
    ended = subprocess.run(
        TESTS, env=os.environ | {"PYTHONPATH": "src"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    report = ended.stdout.strip().splitlines()
    total = next(int(line.split()[1]) for line in reversed(report) if line.startswith("Ran "))
    wrong = sum(line.startswith(("FAIL:", "ERROR:")) for line in report)
    return (total - wrong) / total, report[-1]


def main() -> int:
    if "--critique" in sys.argv:
        print(TRIED.read_text() + f"the tests said: {run_tests()[1]}")
        return 0
    feedback = os.environ.get("BRANCHING_FEEDBACK", "")
    if "--score" in sys.argv:
        guess = GUESSES[int(os.environ["BRANCHING_ATTEMPT"])]
    else:
        guess = next(candidate for candidate in GUESSES if f"tried {candidate}\n" not in feedback + "\n")
    write_guess(guess)
    share, verdict = run_tests()
    print(f"key = {guess}: {share:.1%} of the tests pass ({verdict})")
    if "--score" in sys.argv:
        os.write(3, f"{share:.4f}".encode())
        return 0
    if share < 1:
        ruled_out = [line for line in feedback.splitlines() if line.startswith("tried ")]
        TRIED.write_text("".join(f"{line}\n" for line in [*ruled_out, f"tried {guess}"]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
