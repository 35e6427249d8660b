"""`branching fork`: programs of any kind, forked, compared and merged."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Running, branching
from support.forks import branch_with, called, until
from support.waiting import until_unchanged

from branching import BranchError, Workspace
from branching.agent.types import MergeResult
from branching.cli.fork_command import _whole
from branching.runlog.control_socket import send_request
from branching.runlog.run_log import Entry, read_entries


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def test_one_command_in_many_branches_one_is_merged(root: Path) -> None:
    script = "echo $BRANCHING_ATTEMPT $BRANCHING_LABEL > mine; test $BRANCHING_ATTEMPT -ge 1"
    done = called(root, "fork", "-n", "2", "--", "sh", "-c", script)
    assert done.code == 0, done.err
    assert "✓ branch 1 won · merged 1 path · undo: branching undo" in done.err
    assert "[0] failed (exit 1)" in done.out
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
    done = called(root, "fork", *candidates, "--test-command", "grep -q 42 answer")
    assert done.code == 0, done.err
    assert (root / "answer").read_text() == "42\n"


@pytest.mark.parametrize("chooser", [[], ["--judge", "echo 0"], ["--pick", "0"]])
def test_a_branch_that_fails_the_tests_is_not_merged(root: Path, chooser: list[str]) -> None:
    words = ["-c", "echo broken >made", "--test-command", "exit 1", *chooser]
    done = branching(root, "fork", "--json", *words)
    assert done.code == 1, done.err
    assert (done.document["committed"], done.document["winner"]) == (False, None)
    assert not (root / "made").exists()
    # The work is not lost: the fork is open, and a person can decide otherwise.
    done = called(root, "fork", "--resume", done.document["fork"], "--pick", "0")
    assert done.code == 0, done.err
    assert (root / "made").read_text() == "broken\n"


def test_failed_tests_are_reported_with_the_next_commands(root: Path) -> None:
    done = called(root, "fork", "-c", "echo broken >made", "--test-command", "exit 1")
    assert done.code == 1
    assert "✗ no branch was merged" in done.err
    (hint,) = [line for line in done.out.splitlines() if line.startswith("the tests failed;")]
    fork = hint.partition("--drop ")[2].split()[0]
    assert called(root, "fork", "--drop", fork).code == 0


@pytest.mark.parametrize(
    ("select", "merged"),
    [
        ("*.md", ["a.md", "docs/b.md"]),
        ("**/*.md", ["a.md", "docs/b.md"]),
        ("docs/**", ["docs/b.md", "docs/c"]),
        ("docs", ["docs/b.md", "docs/c"]),
        ("docs/", ["docs/b.md", "docs/c"]),
        ("/docs/?", ["docs/c"]),
        ("[ab].md", ["a.md", "docs/b.md"]),
        ("a.md", ["a.md"]),
    ],
)
def test_select_takes_globs_as_run_does(root: Path, select: str, merged: list[str]) -> None:
    script = "mkdir docs; for f in a.md docs/b.md docs/c d; do echo x >$f; done"
    done = called(root, "fork", "-c", script, "--select", select)
    assert done.code == 0, done.err
    made = [name for name in ("a.md", "docs/b.md", "docs/c", "d") if (root / name).exists()]
    assert made == merged


def test_unselected_changes_are_in_the_winners_patch(root: Path) -> None:
    script = "echo a >a.md; echo rest >rest; mkdir d; echo deep >d/rest"
    done = called(root, "fork", "-c", script, "--select", "*.md")
    assert "not selected: d d/rest rest" in done.out.splitlines()
    (how,) = [line for line in done.out.splitlines() if "branching log --patch " in line]
    patch = called(root, *how.partition(": branching ")[2].split()).out
    assert not (root / "rest").exists()
    subprocess.run(
        ["git", "apply", "--exclude=a.md", "-"], cwd=root, input=patch, text=True, check=True
    )
    assert (root / "rest").read_text() == "rest\n"
    assert (root / "d" / "rest").read_text() == "deep\n"
    done = branching(root, "fork", "--json", "-c", "echo b >b; echo c >c", "--select", "b")
    assert done.document["unselected"] == ["c"]


def test_a_selection_of_nothing_merges_nothing_and_keeps_the_fork(root: Path) -> None:
    done = called(root, "fork", "-c", "echo x >a.md", "--select", "*.rs")
    assert done.code != 0
    assert "none of the 1 paths that the winner changed is selected" in done.err
    fork = done.err.partition("--resume ")[2].split()[0]
    done = called(root, "fork", "--resume", fork, "--select", "*.md")
    assert done.code == 0, done.err
    assert (root / "a.md").exists()


def test_a_judge_sees_all_branches_and_names_the_winner(root: Path) -> None:
    judge = (
        "echo \"$BRANCHING_CASE\" | grep -q 'label two' || exit 9; "
        'set -- $BRANCHING_BRANCHES; [ "$(cat "$2/made")" = 2 ] || exit 7; '
        '(echo x > "$2/made") 2>/dev/null && exit 8; '
        "echo two 0.9"
    )
    done = branching(
        root, "fork", "--label", "one", "--label", "two",
        "-c", "echo 1 > made", "-c", "echo 2 > made", "--judge", judge,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert (root / "made").read_text() == "2\n"


@pytest.mark.parametrize("judge", ["echo 0; false", "echo nobody", "echo one two"])
def test_a_judge_that_does_not_judge_merges_nothing(root: Path, judge: str) -> None:
    done = called(root, "fork", "-c", "echo 1 > made", "--judge", judge)
    assert done.code == 125
    assert "nothing was merged" in done.err
    assert not (root / "made").exists()


def test_pick_merges_the_one_that_was_named(root: Path) -> None:
    candidates = ["-c", "echo 0 > made", "-c", "echo 1 > made"]
    assert called(root, "fork", *candidates, "--pick", "1").code == 0
    assert (root / "made").read_text() == "1\n"
    done = called(root, "fork", "-c", "true", "-c", "false", "--pick", "1")
    assert done.code == 1
    assert "✗ no branch was merged" in done.err


@pytest.mark.parametrize(
    ("policy", "code", "content"),
    [
        ("keep", 0, "1\n2\n3 base\n"),
        ("theirs", 0, "1 branch\n2\n3\n"),
        ("fail", 125, "1\n2\n3 base\n"),
    ],
)
def test_conflicts_end_as_the_options_say(
    real: Mounted, policy: str, code: int, content: str
) -> None:
    """The file is changed in the base, behind the mount, while the branch runs."""
    lines = real.base / "lines"
    lines.write_text("1\n2\n3\n")
    script = "sed -i 's/^1$/1 branch/' lines; touch begun; while [ ! -e go ]; do sleep 0.1; done"
    # The branch cannot see the base; it waits for a file that is put into the branch itself.
    run = Running(real.root, ["fork", "--on-conflict", policy, "-q", "-c", script])
    branch = branch_with(real.root, "begun", run)
    lines.write_text("1\n2\n3 base\n")
    (branch / "go").touch()
    done = run.done()
    assert done.code == code
    assert "lines" in done.out + done.err, "the conflict is told"
    assert lines.read_text() == content
    if code == 0:  # what the branch made of the file can still be had
        found = re.search(r"the winner's version of these paths: branching (.*)", done.out)
        assert found
        assert "+1 branch\n" in called(real.root, *found[1].split()).out


@pytest.mark.parametrize("driver", ["real", "overlaid"])
def test_a_merge_leaves_another_fork_live(driver: str, request: pytest.FixtureRequest) -> None:
    """Two forks that change different files, with both drivers."""
    mounted: Mounted = request.getfixturevalue(driver)
    top = mounted.root
    scripts = [
        f"touch begun{n}; while [ ! -e go ]; do sleep 0.1; done; touch made{n}" for n in "ab"
    ]
    runs = [Running(top, ["fork", "-q", "-c", script]) for script in scripts]
    branches = [branch_with(top, f"begun{n}", run) for n, run in zip("ab", runs, strict=True)]
    for branch, run in zip(branches, runs, strict=True):
        (branch / "go").touch()
        done = run.done()
        assert done.code == 0, done.err
    assert {"madea", "madeb"} <= {path.name for path in mounted.base.iterdir()}


@pytest.mark.parametrize("driver", ["real", "overlaid"])
def test_the_second_of_two_forks_of_one_file_keeps_the_first_and_its_own_as_a_patch(
    driver: str, request: pytest.FixtureRequest
) -> None:
    mounted: Mounted = request.getfixturevalue(driver)
    top = mounted.root
    (mounted.base / "lines").write_text("1\n")
    scripts = [
        f"echo {n} > lines; touch begun{n} own{n}; while [ ! -e go ]; do sleep 0.1; done"
        for n in "ab"
    ]
    runs = [Running(top, ["fork", "-q", "-c", script]) for script in scripts]
    branches = [branch_with(top, f"begun{n}", run) for n, run in zip("ab", runs, strict=True)]
    ended = []
    for branch, run in zip(branches, runs, strict=True):
        (branch / "go").touch()
        ended.append(run.done())
    first, second = ended
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "conflict" not in first.out
    assert "go" not in second.out, "both made the same of it"
    assert "1 conflict: lines" in second.out
    assert (mounted.base / "lines").read_text() == "a\n"
    assert {"owna", "ownb"} <= {path.name for path in mounted.base.iterdir()}
    found = re.search(r"the winner's version of these paths: branching (.*)", second.out)
    assert found
    assert "\n+b\n" in called(top, *found[1].split()).out
    with Workspace(top) as space:
        assert space.branches() == []


def test_merge3_and_empty_labels_are_refused(root: Path) -> None:
    assert called(root, "fork", "--on-conflict", "merge3", "-c", "true").code == 2
    assert called(root, "fork", "--label", "", "-c", "true").code == 2


def test_no_success_and_no_time(root: Path) -> None:
    assert called(root, "fork", "-c", "false", "-c", "exit 7").code == 1
    done = called(root, "fork", "--timeout", "1s", "-c", "sleep 3600")
    assert done.code == 124
    assert "budget_exhausted" in done.out


def test_a_signal_ends_all_and_leaves_patches(root: Path) -> None:
    run = Running(root, ["fork", "-c", "touch begun; sleep 3600"])
    branch_with(root, "begun", run)
    run.signal(signal.SIGTERM)
    done = run.done()
    assert done.code == 128 + signal.SIGTERM
    with Workspace(root) as space:
        assert not space.branches()
    assert "Hint: what was changed is saved: branching log --patch " in done.err
    name = done.err.split("branching log --patch ")[1].split()[0]
    assert "b/begun" in called(root, "log", "--patch", name).out


def test_the_patch_of_a_loser_is_kept(root: Path) -> None:
    """Against its own base: the winner changes the same file."""
    ways = [f"echo {name} >> {NAME_FROM}" for name in ("loser", "winner")]
    done = called(root, "fork", "--pick", "1", *(word for way in ways for word in ("-c", way)))
    assert done.code == 0, done.err
    loser, _ = called(root, "log", "--json").document["candidates"]
    patch = called(root, "log", "--patch", loser["branch"]).out
    assert "+loser" in patch
    assert "winner" not in patch


def test_output_is_shown_by_label_and_kept(root: Path) -> None:
    """Also a last line that has no end."""
    candidates = ["--label", "one", "-c", "echo first; printf second", "-c", "echo no; exit 4"]
    done = called(root, "fork", *candidates)
    assert done.code == 0, done.err
    assert {"[one] first", "[one] second", "[1] no"} <= {*done.err.splitlines()}
    won, failed = called(root, "log", "--json").document["candidates"]
    assert (won["command"], won["index"], won["state"]) == ("fork", 0, "won")
    assert won["label"] == "one: echo first; printf second"
    assert (failed["index"], failed["state"]) == (1, "failed")
    assert called(root, "log", won["branch"]).out == "first\nsecond\n"
    assert called(root, "fork", "-q", *candidates).err == "✓ branch one won · merged 0 paths\n"


class Steered:
    """A fork of one program that counts, in another process."""

    def __init__(self, real: Mounted, script: str, *more: str) -> None:
        self._logs = real.base / ".branching" / "logs"
        self.running = Running(real.root, ["fork", "-q", "-c", script, *more])
        until(self.entries, "it is known")

    def entries(self) -> list[Entry]:
        return read_entries(self._logs)

    def output(self) -> str:
        return (self._logs / f"{self.entries()[0].branch}.log").read_text()

    def ask(self, do: str, text: str = "") -> None:
        entry = self.entries()[0]

        def answered() -> bool:
            try:
                send_request(self._logs / entry.door, do, entry.branch, text)
            except BranchError:
                if self.running.process.poll() is not None:
                    raise
                return False  # it is just being started
            return True

        until(answered, f"it hears {do}")


COUNTING = "i=0; until [ -s end ]; do i=$((i+1)); echo $i; sleep 0.02; done"


class TestFromAnotherProcess:
    """`branching watch` connects to the control socket of the call."""

    def test_it_is_paused_immediately_and_resumes(self, real: Mounted) -> None:
        call = Steered(real, COUNTING)
        until(lambda: call.output().count("\n") > 2, "it counts")
        call.ask("pause")
        until(lambda: call.entries()[0].state == "paused", "that is seen")
        until_unchanged(call.output, "the output stops")
        said = call.output()
        call.ask("resume")
        until(lambda: call.output() != said, "it goes on")
        until(lambda: call.entries()[0].state == "running", "that is seen")
        call.ask("stop")
        assert call.running.done().code == 1
        assert call.entries()[0].state == "terminated"

    def test_a_finished_branch_is_seen_while_others_run(self, real: Mounted) -> None:
        call = Steered(real, "true", "-c", COUNTING)
        until(
            lambda: sorted(each.state for each in call.entries()) == ["done", "running"],
            "that is seen",
        )
        call.running.signal(signal.SIGTERM)
        assert call.running.done().code == 128 + signal.SIGTERM

    def test_it_receives_a_message(self, real: Mounted) -> None:
        waits = 'until grep -q "go on" "$BRANCHING_STEER"; do sleep 0.02; done; touch won'
        call = Steered(real, waits)
        call.ask("tell", "go on")
        assert call.running.done().code == 0
        assert (real.base / "won").exists()

    def test_a_loser_is_kept_on_request(self, real: Mounted) -> None:
        waits = 'touch lost; until [ -s "$BRANCHING_STEER" ]; do sleep 0.02; done; exit 1'
        call = Steered(real, waits, "-c", "touch won")
        call.ask("keep")
        call.ask("tell", "end")
        done = call.running.done()
        assert done.code == 0, done.err
        with Workspace(real.root) as space:
            [record] = space.branches()
        assert f"kept: {record.name}" in done.out
        assert (record.path / "lost").exists()
        assert (real.base / "won").exists()
        assert called(real.root, "commit", "--policy", "snapshot", record.name).code == 0
        assert (real.base / "lost").exists()


def test_the_cost_is_reported(root: Path) -> None:
    """With the budgets of the command line: of each branch, and of all together."""
    tells = """echo '{"usd": 0.3, "tokens": 10}' >&3"""
    done = branching(
        root, "fork", "--json", "--budget-usd", "0.5", "--group-budget-tokens", "100",
        "-c", f"{tells}; touch made", "-c", f"{tells}; {tells}; sleep 3600", "-c", "true",
    )  # fmt: skip
    assert done.code == 0, done.err
    kept, beyond, silent = done.document["branches"]
    assert (kept["state"], kept["spent"]) == ("done", {"usd": 0.3, "tokens": 10, "requests": 1})
    assert (beyond["state"], beyond["spent"]["usd"]) == ("budget_exhausted", 0.6)
    assert (silent["state"], silent["spent"]) == ("failed", None)
    assert called(root, "log", "--json").document["candidates"][0]["cost_usd"] == 0.3
    done = called(root, "fork", "--budget-tokens", "5", "-c", tells)
    assert done.code == 1, "not 124: the time was not over"
    assert "spent $0.3000, 10 tokens, 1 requests" in done.out


def test_a_signal_in_the_moment_of_the_merge_comes_too_late() -> None:
    """The command reports that the merge was committed."""

    async def work() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        merged = MergeResult(
            fork_id="f", winner_branch_id="a", discarded_branches=(), history_after_merge=None
        )

        async def merge() -> MergeResult:
            begun.set()
            await go_on.wait()
            return merged

        task = asyncio.ensure_future(_whole(merge()))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        assert await task is merged

    asyncio.run(work())


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
def test_invalid_options_are_a_usage_error(root: Path, words: list[str]) -> None:
    assert called(root, "fork", *words).code == 2
