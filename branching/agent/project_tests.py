"""The tests of a branch: the command that runs them, and its result.

The command runs in the branch's directory, in its sandbox; a string is a shell command. Exit code 0
means that the tests pass (also if none was collected), any other that they fail. A command that
could not be started, or that timed out, gives no result.

The number of passed tests is read from a JUnit XML file that the command writes, or else from the
summary of pytest, unittest, cargo or jest. With `partial_credit`, a failed run counts by its share
of passed tests.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from branching.agent.run_program import RunSettings, run_program
from branching.errors import BranchingError
from branching.process.bounded_output import OutputTail

if TYPE_CHECKING:
    from branching.agent.branch_runtime import BranchRuntime

TIMEOUT_SECONDS = 60.0
OUTPUT_BYTES_MAX = 1 << 20
"""Of what a test run prints the end is kept: that is where runners sum up."""
REPORT_BYTES_MAX = 32 << 20
"""A JUnit file larger than this is not read."""
MANIFEST_BYTES_MAX = 1 << 20
"""Nor is a Makefile or the like."""


@dataclass(frozen=True, kw_only=True)
class TestCounts:
    """How many tests there were."""

    __test__ = False  # its name makes pytest look

    passed: int = 0
    failed: int = 0
    """Errors too."""
    skipped: int = 0

    @property
    def ratio(self) -> float:
        """The part of those run that passed; 1.0 where none was run."""
        ran = self.passed + self.failed
        return self.passed / ran if ran else 1.0


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """What came of one run of the tests."""

    __test__ = False

    ratio: float | None
    """1.0 passed, 0.0 failed (or the part that passed), None: nothing is known."""
    reason: str
    """`exit 1`, `timed out after 60 s`, `cannot be run: ...`"""
    exit_code: int | None = None
    counts: TestCounts | None = None
    output: str = ""
    """The end of what it printed."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TestPlan:
    """How the branches of a fork are tested."""

    __test__ = False

    command: str | Sequence[str]
    timeout: float = TIMEOUT_SECONDS
    junit: str | None = None
    """Path in the branch of the JUnit XML file that the command writes."""
    partial_credit: bool = False

    async def run(self, place: RunSettings) -> TestRun:
        """Runs the tests of one branch. Never raises for what the command does."""
        tail = OutputTail(OUTPUT_BYTES_MAX)
        report = None if self.junit is None else place.directory / self.junit
        before = None if report is None else _stamp(report)
        try:
            ended = await run_program(
                self.command, place, stdout=tail.feed, stderr=tail.feed, timeout=self.timeout
            )
        except (BranchingError, OSError) as error:
            return TestRun(ratio=None, reason=f"cannot be run: {error}")
        output = tail.text
        if ended.how == "timeout":
            return TestRun(
                ratio=None,
                reason=f"timed out after {self.timeout:g} s",
                output=output,
                seconds=ended.wall_seconds,
            )
        if ended.how == "error":
            return TestRun(ratio=None, reason=f"cannot be run: {ended.reason}", output=output)
        counts = None
        if report is not None and _stamp(report) != before:
            counts = read_junit(report)
        if counts is None:
            counts = parse_counts(output)
        ratio = 1.0 if ended.success else 0.0
        if self.partial_credit and not ended.success and counts is not None and counts.failed:
            ratio = counts.ratio
        return TestRun(
            ratio=ratio,
            reason=ended.reason,
            exit_code=ended.exit_code,
            counts=counts,
            output=output,
            seconds=ended.wall_seconds,
        )


def read_junit(path: Path) -> TestCounts | None:
    """Reads the counts of a JUnit XML file; None for one that is not there or cannot be read."""
    document = _read(path, REPORT_BYTES_MAX)
    return None if document is None else parse_junit(document)


def parse_junit(document: bytes) -> TestCounts | None:
    """Returns the counts of a JUnit XML document, None if it is invalid.

    A DOCTYPE is refused, because its entities can expand without bound.
    """
    if b"<!DOCTYPE" in document:
        return None
    try:
        root = ElementTree.fromstring(document)
    except ElementTree.ParseError:
        return None
    if root.tag not in ("testsuites", "testsuite"):
        return None
    passed = failed = skipped = 0
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed += 1
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return TestCounts(passed=passed, failed=failed, skipped=skipped)


_WORDS = {
    "passed": "passed", "xpassed": "passed", "failed": "failed", "error": "failed",
    "errors": "failed", "skipped": "skipped", "xfailed": "skipped", "ignored": "skipped",
}  # fmt: skip
_COUNT = re.compile(r"(\d+) (" + "|".join(_WORDS) + r")\b")
_PYTEST = re.compile(r"^=* ?(?P<counts>\d+ \w+(?:, \d+ \w+)*) in [\d.]+m?s", re.M)
_CARGO = re.compile(r"^test result: \w+\. (?P<counts>.*)$", re.M)
_JEST = re.compile(r"^Tests: +(?P<counts>.*\d+ total)", re.M)
_UNITTEST = re.compile(r"^Ran (\d+) tests? in .*\n\n(OK|FAILED)(?: \((?P<how>.*)\))?", re.M)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_counts(output: str) -> TestCounts | None:
    """Returns the counts in the summary of a test runner's output, None without a summary.

    Of several summaries of one kind (cargo prints one for each binary) the sum counts.
    """
    text = _ESCAPES.sub("", output)
    for pattern in (_CARGO, _PYTEST, _JEST):
        found = [match["counts"] for match in pattern.finditer(text)]
        if found:
            return _summed(found if pattern is _CARGO else found[-1:])
    match = _UNITTEST.search(text)
    if match is None:
        return None
    how = dict(re.findall(r"(\w[\w ]*)=(\d+)", match["how"] or ""))
    failed = sum(int(how.get(name, 0)) for name in ("failures", "errors"))
    skipped = int(how.get("skipped", 0))
    return TestCounts(passed=int(match[1]) - failed - skipped, failed=failed, skipped=skipped)


def _summed(summaries: Sequence[str]) -> TestCounts:
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for summary in summaries:
        for number, word in _COUNT.findall(summary):
            counts[_WORDS[word]] += int(number)
    return TestCounts(**counts)


def detect_test_command(directory: Path) -> str | None:
    """Returns the command that runs the project's tests, judged by its files; None if unclear.

    What the project itself calls its tests (a make or just target, npm's script) comes before
    what its language suggests.
    """
    for is_there, command in _PROJECTS:
        if is_there(directory):
            return command
    return None


def _has_target(*names: str, target: str) -> Callable[[Path], bool]:
    pattern = re.compile(rf"^{target}\s*:", re.M)
    return lambda place: any(pattern.search(_text(place / name)) for name in names)


def _has_npm_test(place: Path) -> bool:
    try:
        scripts = json.loads(_text(place / "package.json") or "{}").get("scripts", {})
        return "no test specified" not in scripts.get("test", "no test specified")
    except (ValueError, AttributeError, TypeError):
        return False


def _has_pytest(place: Path) -> bool:
    if "[tool.pytest" in _text(place / "pyproject.toml") or (place / "pytest.ini").is_file():
        return True
    if "[tool:pytest]" in _text(place / "setup.cfg"):
        return True
    return any(
        any(place.glob(glob)) for glob in ("test_*.py", "tests/test_*.py", "tests/conftest.py")
    )


def _has(name: str) -> Callable[[Path], bool]:
    return lambda place: (place / name).is_file()


_PROJECTS: tuple[tuple[Callable[[Path], bool], str], ...] = (
    (_has_target("Makefile", "makefile", "GNUmakefile", target="test"), "make test"),
    (_has_target("justfile", "Justfile", ".justfile", target="test"), "just test"),
    (_has_npm_test, "npm test --silent"),
    (_has("Cargo.toml"), "cargo test --quiet"),
    (_has("go.mod"), "go test ./..."),
    (_has("tox.ini"), "tox -q"),
    (_has_pytest, "python -m pytest -q"),
)


def _text(path: Path) -> str:
    return (_read(path, MANIFEST_BYTES_MAX) or b"").decode("utf-8", "replace")


def _read(path: Path, size_max: int) -> bytes | None:
    """Reads a regular file. O_NONBLOCK, because a path in a branch may be a FIFO."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size > size_max:
            return None
        return opened.read(size_max)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        about = path.lstat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino


class BranchTester:
    """Tests branches for a coordinator. "auto" finds the command in each branch."""

    def __init__(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = TIMEOUT_SECONDS,
        junit: str | None = None,
        partial_credit: bool = False,
        seen_at: Path | None = None,
    ) -> None:
        self._command = command
        self._options: dict[str, Any] = {
            "timeout": timeout,
            "junit": junit,
            "partial_credit": partial_credit,
        }
        self._seen_at = seen_at
        self.runs: dict[str, TestRun] = {}
        """The last run of each branch, by its id."""

    async def __call__(self, branch: BranchRuntime) -> float | None:
        """Returns the part of the branch's tests that passed; None if nothing is known."""
        if branch.path is None:
            return None
        command: str | Sequence[str] | None = self._command
        if command == "auto":
            command = detect_test_command(branch.path)
        if command is None:
            return None
        place = RunSettings(
            directory=branch.path,
            seen_at=self._seen_at or branch.seen_at,
            environment=branch.environment,
        )
        with nullcontext() if branch.branch is None else branch.branch.in_use():
            run = await TestPlan(command=command, **self._options).run(place)
        self.runs[branch.id] = run
        return run.ratio
