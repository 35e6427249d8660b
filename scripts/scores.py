"""Runs the suites that have a number, and writes docs/scores.md: what was run, how much of it, and what passed.

    scripts/scores             a quarter of an hour; root, like the tests
    scripts/scores --soak      the random suites many times: hours
    scripts/scores --print     the page on standard output instead

A suite that fails ends the run: there is no page of a version that fails. The numbers are read from what the tests
print. The scores of a commit are kept in branchfs/target: a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
PAGE = TOP / "docs" / "scores.md"
CARGO = ["cargo", "test", "--locked", "--quiet", "--manifest-path", "branchfs/Cargo.toml"]
PYTEST = [".venv/bin/python", "-m", "pytest", "-q"]
HEAD = """# Scores

Results of the test suites for one version, written by `scripts/scores`. `scripts/test` runs the
same tests for every change; `--soak` runs the random ones many times.

"""
TAIL = """
The cases of pjdfstest that a branch lacks: the C library asks a table of file system types for `LINK_MAX`, and FUSE is
not in it; the kernel's overlayfs keeps the device 0:0, which some cases make, for itself. The classic pjdfstest in Perl
is not run: there is no package of it.

*Before or after*: the whole tree is as it was before the verb or as it is after it, and `branchfs fsck` finds nothing.
"""


@dataclass(frozen=True)
class Suite:
    """A row of the page."""

    name: str
    driver: str
    command: list[str]
    pattern: str
    """Its groups are numbers, which are added up over all places; without groups the places are counted."""
    score: str
    """What the numbers say, as a format."""

    def run(self) -> str:
        """Returns the score. SystemExit if the suite fails or has no numbers."""
        done = subprocess.run(self.command, cwd=TOP, capture_output=True, text=True, check=False)
        found = list(re.finditer(self.pattern, done.stdout + done.stderr))
        if done.returncode or not found:
            sys.exit(f"{done.stdout}{done.stderr}\nscores: {self.name}, {self.driver}: failed; {PAGE} is as it was")
        columns = zip(*(match.groups() for match in found), strict=True)
        return self.score.format(*[sum(map(int, column)) for column in columns] or [len(found)])


def engine(name: str, binary: str, tests: str, pattern: str, score: str) -> list[Suite]:
    """Returns the rows of a suite that runs with both drivers."""
    return [
        Suite(name, driver, [*CARGO, "--test", *place, "--", "--nocapture", *chosen], pattern, score)
        for driver, place, chosen in (
            ("FUSE", [binary], [tests]),
            ("overlay", ["overlay"], [f"{binary}::{tests}"]),
        )
    ]


SUITES = [
    *engine(
        "pjdfstest 0.2.2 (Rust)",
        "posix",
        "every_case",
        r"native (\d+), branch (\d+)",
        "{1} cases pass, {0} do in an ordinary directory",
    ),
    *engine("fsx 0.3.2", "fsx", "every_read", r"(\d+) operations", "{:,} operations, each read right"),
    *engine(
        "`kill -9` of the daemon at a random moment of a verb",
        "killed_daemon",
        "a_daemon_killed_in_any_verb",
        r"(?:true|false)\): (\d+)",
        "{} kills, each before or after",
    ),
    *engine(
        "power cut of a block device: unsynced writes are lost and reordered",
        "power_cuts",
        "",
        r": seed \d+",
        "{} cuts, each before or after",
    ),
    *engine(
        "one system call of the daemon fails (`strace --inject`)",
        "faults",
        "",
        r" runs, (\d+) faults",
        "{:,} errors, each before or after",
    ),
    Suite(
        "one call of the engine to the disk fails",
        "both",
        [*CARGO, "--lib", "--", "--nocapture", "fault_tests"],
        r": (\d+) faults in",
        "{:,} errors, each before or after",
    ),
    Suite(
        "escapes from the sandbox",
        "both",
        [*PYTEST, *(f"tests/python/test_{name}.py" for name in ("escape", "sandbox_rules"))],
        r"(\d+) passed",
        "{} tests, all refused",
    ),
]


def run_suites(suites: list[Suite], kept: Path) -> list[tuple[Suite, str]]:
    """Returns the suites with their scores. Runs those that `kept`, the file of an earlier run, does not have."""
    scores: dict[str, str] = json.loads(kept.read_text()) if kept.exists() else {}
    for suite in suites:
        row = f"{suite.name}, {suite.driver}"
        if row not in scores:
            scores[row] = suite.run()
            draft = kept.with_suffix(".new")
            draft.write_text(json.dumps(scores))
            draft.replace(kept)
        print(f"{row}: {scores[row]}", file=sys.stderr, flush=True)
    return [(suite, scores[f"{suite.name}, {suite.driver}"]) for suite in suites]


def main() -> None:
    """Runs all suites and writes the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--print", action="store_true", dest="is_printed", help="write no file")
    parser.add_argument("--soak", action="store_true", help="many rounds of the random suites")
    options = parser.parse_args()
    if options.soak:
        os.environ["BRANCHFS_SOAK"] = "yes"
    tools = subprocess.run(["scripts/setup"], cwd=TOP, stdout=subprocess.PIPE, text=True, check=True).stdout
    programs = Path(tools.splitlines()[-1]) / "bin"
    os.environ |= {
        "PJDFSTEST": str(programs / "pjdfstest"),
        "FSX": str(programs / "fsx"),
        "BRANCHFS": str(TOP / "branchfs/target/release/branchfs"),
    }
    build = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", "branchfs/Cargo.toml"]
    subprocess.run(build, cwd=TOP, check=True)
    if subprocess.run(
        ["git", "diff", "--quiet", "HEAD", "--", "branchfs", "branching"], cwd=TOP, check=False
    ).returncode:
        sys.exit("scores: there are changes that are not committed: the page names a commit")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TOP, stdout=subprocess.PIPE, text=True, check=True
    )
    name = f"scores-{commit.stdout.strip()}{'-soak' if options.soak else ''}.json"
    scores = run_suites(SUITES, TOP / "branchfs" / "target" / name)
    rows = [f"| {suite.name} | {suite.driver} | {score} |\n" for suite, score in scores]
    when = f"Commit {commit.stdout.strip()}, {datetime.now(timezone.utc):%Y-%m-%d}, Linux {os.uname().release}.\n"
    page = HEAD + when + "\n| suite | driver | score |\n|---|---|---|\n" + "".join(rows) + TAIL
    if options.is_printed:
        print(page, end="")
    else:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
