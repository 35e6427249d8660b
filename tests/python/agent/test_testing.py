"""Tests of a branch: how they are detected, run and counted."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from branching.agent.project_tests import (
    TestCounts,
    TestPlan,
    TestRun,
    detect_test_command,
    parse_counts,
    parse_junit,
    read_junit,
)
from branching.agent.run_program import RunSettings


def run(place: Path, command: str | Sequence[str], **options: object) -> TestRun:
    async def call() -> TestRun:
        plan = TestPlan(command=command, **options)  # type: ignore[arg-type]
        return await plan.run(RunSettings(directory=place))

    return asyncio.run(call())


@pytest.mark.contract("G12", "P13")
@pytest.mark.parametrize(
    ("command", "ratio"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("true && false", 0.0),
        ("echo 'no tests ran in 0.01s'", 1.0),
        (["sh", "-c", "exit 3"], 0.0),
        ("kill -9 $$", 0.0),
        (["no-such-program-anywhere"], None),
    ],
    ids=str,
)
def test_the_exit_code_of_the_test_command_decides(
    place: Path, command: str, ratio: float | None
) -> None:
    """Any shell command; a command that cannot be run has no result."""
    assert run(place, command).ratio == ratio


@pytest.mark.contract("G12")
def test_tests_run_in_the_branch(place: Path) -> None:
    (place / "answer").write_text("42\n")
    done = run(place, "grep -q 42 answer && pwd")
    assert (done.ratio, done.output) == (1.0, f"{place}\n")


@pytest.mark.contract("G12")
def test_a_test_run_that_times_out_has_no_result(place: Path) -> None:
    done = run(place, "sleep 3600", timeout=1.0)
    assert done.ratio is None
    assert done.reason == "timed out after 1 s"


@pytest.mark.contract("G12")
def test_a_cancelled_test_run_is_killed(place: Path) -> None:
    async def call() -> None:
        plan = TestPlan(command="touch begun; sleep 3600")
        task = asyncio.ensure_future(plan.run(RunSettings(directory=place)))
        while not (place / "begun").exists():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(call(), 60))


def test_the_counts_come_from_the_junit_file_that_the_run_wrote(place: Path) -> None:
    report = "<testsuites><testsuite><testcase/><testcase/><testcase><failure/></testcase>"
    report += "<testcase><skipped/></testcase></testsuite></testsuites>"
    done = run(place, f"echo '{report}' > out.xml; exit 1", junit="out.xml", partial_credit=True)
    assert done.counts == TestCounts(passed=2, failed=1, skipped=1)
    assert done.ratio == pytest.approx(2 / 3)


def test_a_junit_file_of_an_earlier_run_does_not_count(place: Path) -> None:
    (place / "out.xml").write_text("<testsuite><testcase/></testsuite>")
    assert run(place, "exit 1", junit="out.xml", partial_credit=True).counts is None


def test_a_failed_run_is_worth_nothing_unless_parts_are_asked_for(place: Path) -> None:
    command = "echo '1 failed, 3 passed in 0.1s'; exit 1"
    assert run(place, command).ratio == 0.0
    assert run(place, command, partial_credit=True).ratio == 0.75


@pytest.mark.contract("L17")
@pytest.mark.parametrize(
    ("output", "counts"),
    [
        ("===== 3 passed, 1 failed, 2 skipped in 0.12s =====", (3, 1, 2)),
        ("\x1b[32m12 passed\x1b[0m in 3.10s", (12, 0, 0)),
        ("1 error in 0.05s", (0, 1, 0)),
        ("test result: ok. 5 passed; 0 failed; 1 ignored\ntest result: ok. 2 passed; 1 failed",
         (7, 1, 1)),
        ("Ran 5 tests in 0.001s\n\nFAILED (failures=1, errors=1, skipped=1)", (2, 2, 1)),
        ("Ran 4 tests in 0.001s\n\nOK", (4, 0, 0)),
        ("Tests:       1 failed, 2 skipped, 9 passed, 12 total", (9, 1, 2)),
    ],
    ids=["pytest", "colour", "error", "cargo", "unittest", "unittest ok", "jest"],
)  # fmt: skip
def test_summaries_of_test_runners_are_read(output: str, counts: tuple[int, int, int]) -> None:
    passed, failed, skipped = counts
    assert parse_counts(output) == TestCounts(passed=passed, failed=failed, skipped=skipped)


@pytest.mark.parametrize("output", ["", "all good", "I passed 3 tests, I think", "passed"])
def test_output_without_a_summary_has_no_counts(output: str) -> None:
    assert parse_counts(output) is None


@pytest.mark.parametrize(
    "document",
    [b"", b"<html/>", b"<testsuite>", b'<!DOCTYPE a [<!ENTITY b "c">]><testsuite/>'],
)
def test_an_invalid_junit_report_has_no_counts(document: bytes) -> None:
    assert parse_junit(document) is None


def test_a_report_that_is_a_pipe_or_a_link_is_not_read(place: Path) -> None:
    """Reading it could wait for ever, or lead out of the branch."""
    os.mkfifo(place / "pipe")
    (place / "real").write_text("<testsuite><testcase/></testsuite>")
    (place / "link").symlink_to("real")
    assert read_junit(place / "pipe") is None
    assert read_junit(place / "link") is None
    assert read_junit(place / "real") == TestCounts(passed=1)


@pytest.mark.contract("L18")
@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"Makefile": "all:\n\ntest: all\n\tpytest\n", "pytest.ini": ""}, "make test"),
        ({"justfile": "test:\n  cargo test\n", "Cargo.toml": ""}, "just test"),
        ({"package.json": json.dumps({"scripts": {"test": "jest"}})}, "npm test --silent"),
        ({"package.json": json.dumps({"scripts": {"test": "echo no test specified"}})}, None),
        ({"package.json": "[1"}, None),
        ({"Cargo.toml": ""}, "cargo test --quiet"),
        ({"go.mod": ""}, "go test ./..."),
        ({"pyproject.toml": "[tool.pytest.ini_options]"}, "python -m pytest -q"),
        ({"tests/test_it.py": ""}, "python -m pytest -q"),
        ({"Makefile": "all:\n"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_test_command_is_detected(
    place: Path, files: dict[str, str], command: str | None
) -> None:
    for name, text in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    assert detect_test_command(place) == command
