"""`branching fork`: programs of any kind, forked, compared and merged."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Running, branching

from branching import Workspace

SECONDS_MAX = 100


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def test_one_command_in_many_branches_one_is_merged(root: Path) -> None:
    script = "echo $BRANCHING_ATTEMPT $BRANCHING_LABEL > mine; test $BRANCHING_ATTEMPT -ge 1"
    done = branching(root, "fork", "-n", "2", "--", "sh", "-c", script)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "winner: 1"
    assert "[0] failed" in done.out
    assert (root / "mine").read_text() == "1 1\n"


def test_its_document(root: Path) -> None:
    done = branching(
        root, "fork", "--json", "--label", "a", "--label", "b",
        "-c", f"echo new > new; rm {NAME_FROM}", "-c", "exit 3",
        "--test-command", "echo '2 passed in 1s'",
    )  # fmt: skip
    assert done.code == 0, done.err
    facts = done.document
    assert (facts["version"], facts["command"], facts["committed"]) == (1, "fork", True)
    assert facts["winner"] == "a"
    assert [(each["label"], each["state"]) for each in facts["branches"]] == [
        ("a", "done"),
        ("b", "failed"),
    ]
    assert facts["branches"][0]["tests"]["counts"] == {"passed": 2, "failed": 0, "skipped": 0}
    assert facts["branches"][1]["tests"] is None
    assert (facts["applied"], facts["deleted"]) == (["new"], [NAME_FROM])
    assert (facts["conflicts"], facts["errors"]) == ([], [])


def test_the_branch_wins_whose_tests_pass(root: Path) -> None:
    candidates = ["-c", "echo 41 > answer", "-c", "echo 42 > answer", "-c", "echo 43 > answer"]
    done = branching(root, "fork", *candidates, "--test-command", "grep -q 42 answer")
    assert done.code == 0, done.err
    assert (root / "answer").read_text() == "42\n"


def test_a_judge_sees_all_branches_and_names_the_winner(root: Path) -> None:
    judge = (
        "echo \"$BRANCHING_CASE\" | grep -q 'label two' || exit 9; "
        'set -- $BRANCHING_BRANCHES; cat "$2/made"; (echo x > "$2/made") 2>/dev/null && exit 8; '
        "echo two 0.9"
    )
    done = branching(
        root, "fork", "--label", "one", "--label", "two",
        "-c", "echo 1 > made", "-c", "echo 2 > made", "--judge", judge,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (root / "made").read_text() == "2\n"


@pytest.mark.parametrize("judge", ["false", "echo nobody", "echo one two"])
def test_a_judge_that_does_not_judge_merges_nothing(root: Path, judge: str) -> None:
    done = branching(root, "fork", "-c", "echo 1 > made", "--judge", judge)
    assert done.code == 125
    assert "nothing was merged" in done.err
    assert not (root / "made").exists()


def test_pick_merges_the_one_that_was_named(root: Path) -> None:
    candidates = ["-c", "echo 0 > made", "-c", "echo 1 > made"]
    assert branching(root, "fork", *candidates, "--pick", "1").code == 0
    assert (root / "made").read_text() == "1\n"
    done = branching(root, "fork", "-c", "true", "-c", "false", "--pick", "1")
    assert done.code == 1
    assert done.out.splitlines()[0] == "no branch was merged"


@pytest.mark.parametrize(
    ("policy", "code", "content"),
    [
        ("keep", 0, "1\n2\n3 base\n"),
        ("theirs", 0, "1 branch\n2\n3\n"),
        ("merge3", 0, "1\n2\n3 base\n"),
        ("fail", 125, "1\n2\n3 base\n"),
    ],
)
def test_conflicts_end_as_they_are_told_to(
    real: Mounted, policy: str, code: int, content: str
) -> None:
    """The file is changed in the base, behind the mount, while the branch runs. What was there at
    the fork is gone then, so that a text cannot be merged: it is kept, as by `keep`."""
    lines = real.base / "lines"
    lines.write_text("1\n2\n3\n")
    script = "sed -i 's/^1$/1 branch/' lines; touch begun; while [ ! -e go ]; do sleep 0.1; done"
    # The branch cannot see the base; it waits for a file that is put into the branch itself.
    run = Running(real.root, ["fork", "--on-conflict", policy, "-q", "-c", script])
    branch = _branch_with(real.root, "begun")
    lines.write_text("1\n2\n3 base\n")
    (branch / "go").touch()
    done = run.done()
    assert done.code == code
    assert "lines" in done.out + done.err, "the conflict is told"
    assert lines.read_text() == content


def _branch_with(root: Path, name: str) -> Path:
    deadline = time.monotonic() + SECONDS_MAX
    while time.monotonic() < deadline:
        with Workspace(root) as space:
            for record in space.branches():
                if (record.path / name).exists():
                    return record.path
        time.sleep(0.05)
    raise AssertionError(f"no branch has made {name}")


def test_no_success_and_no_time(root: Path) -> None:
    assert branching(root, "fork", "-c", "false", "-c", "exit 7").code == 1
    done = branching(root, "fork", "--timeout", "1s", "-c", "sleep 3600")
    assert done.code == 124
    assert "budget_exhausted" in done.out


def test_a_signal_ends_all_and_leaves_nothing(root: Path) -> None:
    run = Running(root, ["fork", "-c", "touch begun; sleep 3600"])
    _branch_with(root, "begun")
    run.signal(signal.SIGTERM)
    assert run.done().code == 128 + signal.SIGTERM
    with Workspace(root) as space:
        assert not space.branches()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["-c", "true", "--", "true"],
        ["-n", "2", "-c", "true"],
        ["--pick", "5", "-c", "true"],
        ["--label", "a", "--label", "a", "-c", "true", "-c", "true"],
        ["--pick", "0", "--judge", "true", "-c", "true"],
    ],
    ids=str,
)
def test_what_makes_no_sense_is_a_usage_error(root: Path, words: list[str]) -> None:
    assert branching(root, "fork", *words).code == 2
