"""The search commands that the published package does not have, and the options they share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import OnTerminal, branching

from branching import ProcessBranchError, Workspace
from branching.process import port_ranges
from branching.process.port_ranges import PORTS_EACH, reserve_ports


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def open_branches(root: Path) -> list[str]:
    space = Workspace(root)
    found = [record.name for record in space.branches()]
    space.close()
    return found


class TestCascaded:
    def test_a_wave_knows_why_the_waves_before_failed(self, root: Path) -> None:
        script = (
            'echo "$BRANCHING_FEEDBACK" > feedback; echo "tried $BRANCHING_ATTEMPT"; '
            "test $BRANCHING_ATTEMPT -ge 3"
        )
        done = branching(root, "cascaded", "--fan-out", "1,2,1", "--", "sh", "-c", script)
        assert done.code == 0, done.err
        assert done.out == (
            "  [0] fail (exit 1)\n  [1] fail (exit 1)\n  [2] fail (exit 1)\n  [3] ok\n"
        )
        lines = (root / "feedback").read_text().splitlines()
        assert lines == ["exit 1", "tried 0", "exit 1", "tried 1", "exit 1", "tried 2"]

    def test_its_document(self, root: Path) -> None:
        done = branching(root, "cascaded", "--json", "--fan-out", "2", "false")
        assert done.code == 1
        facts = done.document
        assert (facts["command"], facts["committed"], facts["winner"]) == ("cascaded", False, None)
        assert (facts["attempts"], facts["fan_out"], facts["action"]) == (2, [2], "aborted")

    def test_a_wave_has_a_time_of_its_own(self, root: Path) -> None:
        script = "test $BRANCHING_ATTEMPT = 1 || sleep 60"
        words = ["--wave-timeout", "2s", "--fan-out", "1,1", "--", "sh", "-c", script]
        done = branching(root, "cascaded", *words)
        assert done.code == 0
        assert "✓ attempt 1 won · nothing to commit" in done.err


class TestTournament:
    JUDGE = 'test $(cat "$BRANCHING_A/made") -gt $(cat "$BRANCHING_B/made") && echo a || echo b'

    def test_the_judge_leaves_one(self, root: Path) -> None:
        words = [word for n in (3, 1, 9, 5, 7) for word in ("-c", f"echo {n} > made")]
        done = branching(root, "tournament", "--judge", self.JUDGE, *words)
        assert done.code == 0, done.err
        assert "✓ candidate 2 won · committed 1 path (+1) · undo: branching undo" in done.err
        assert (root / "made").read_text() == "9\n"
        assert open_branches(root) == []

    def test_one_command_n_times(self, root: Path) -> None:
        script = "echo $BRANCHING_ATTEMPT > made"
        words = ["--json", "-n", "3", "--parallel-judges", "--judge", self.JUDGE]
        done = branching(root, "tournament", *words, "--", "sh", "-c", script)
        assert (done.document["winner"], done.document["candidates"]) == (2, 3)

    @pytest.mark.parametrize("judge", ["exit 3", "echo neither", "true", "no-such-program"])
    def test_a_judge_that_fails_ends_the_call(self, root: Path, judge: str) -> None:
        done = branching(root, "tournament", "--judge", judge, "-n", "2", "touch", "made")
        assert (done.code, done.out) == (125, "")
        assert "the judge command failed" in done.err
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []


EXPAND = (
    'test $BRANCHING_DEPTH = 1 || exit 9; echo "cat made; echo 5 >&3; echo $(cat made)x > made"'
)


class TestByLevels:
    @pytest.mark.parametrize("command", ["beam-search", "tree-of-thoughts"])
    def test_the_next_level_goes_on_from_the_best(self, root: Path, command: str) -> None:
        words = ["-c", "echo a > made; echo 1 >&3", "-c", "echo b > made; echo 2 >&3"]
        width = ["--beam-width", "1"] if command == "beam-search" else []
        done = branching(root, command, *words, *width, "--expand", EXPAND)
        assert done.code == 0, done.err
        assert "✓ candidate 2 won (5.00) · committed 1 path (+1)" in done.err
        assert (root / "made").read_text() == "bx\n"
        assert open_branches(root) == []

    def test_evaluate_scores_by_descriptor_or_by_the_last_line(self, root: Path) -> None:
        words = ["-c", "echo 3 > made", "-c", "echo 4 > made"]
        for evaluate in ("cat made", "cat made >&3; echo done"):
            done = branching(root, "tree-of-thoughts", "--json", "--evaluate", evaluate, *words)
            assert done.document["winner"] == {"index": 1, "score": 4.0}
        words = ["best-of-n", "--judge", "echo much", "-n", "1", "true"]
        done = branching(root, *words)
        assert (done.code, "wrote no number" in done.err) == (125, True)

    def test_an_expansion_that_fails_ends_the_call(self, root: Path) -> None:
        done = branching(root, "beam-search", "-c", "touch made", "--expand", "exit 3")
        assert (done.code, "the expand command failed (exit 3)" in done.err) == (125, True)
        assert names(root) == [NAME_FROM]

    def test_no_expansions_end_the_search(self, root: Path) -> None:
        done = branching(root, "beam-search", "-c", "touch made", "--expand", "true")
        assert (done.code, names(root)) == (0, ["made", NAME_FROM])


class TestOptions:
    def test_a_setup_runs_once_before_all(self, root: Path) -> None:
        setup = 'echo "x$BRANCHING_ATTEMPT" >> prepared; echo "set up"'
        words = ["--setup", setup, "-c", "false", "-c", "grep -q x prepared"]
        done = branching(root, "speculate", *words)
        assert done.code == 0, done.err
        assert "[setup] set up" in done.err.splitlines()
        assert (root / "prepared").read_text() == "x\n"

    def test_a_setup_that_fails_lets_nothing_be_tried(self, root: Path) -> None:
        for words in (["best-of-n"], ["run"]):
            done = branching(root, *words, "--setup", "touch made; exit 3", "touch", "tried")
            assert (done.code, done.out) == (125, "")
            assert "the setup failed ('exit 3')" in done.err
            assert names(root) == [NAME_FROM]
            assert open_branches(root) == []

    def test_run_keeps_one_branch_with_setup_and_work(self, root: Path) -> None:
        words = ["--setup", "touch prepared", "--on-success", "keep", "-b", "mine"]
        assert branching(root, "run", *words, "touch", "made").code == 0
        assert open_branches(root) == ["mine"]
        assert branching(root, "commit", "mine").code == 0
        assert names(root) == ["made", "prepared", NAME_FROM]

    def test_the_winner_can_be_kept(self, root: Path) -> None:
        done = branching(root, "speculate", "--on-success", "keep", "-c", "touch made")
        assert done.code == 0
        kept = done.out.splitlines()[-1].removeprefix("kept: ")
        assert done.err == (
            f"✓ candidate 0 won · kept branch {kept} · commit: branching commit {kept}\n"
        )
        assert open_branches(root) == [kept]
        assert names(root) == [NAME_FROM]
        assert branching(root, "commit", kept).code == 0
        assert names(root) == ["made", NAME_FROM]

    def test_the_winner_can_be_dropped(self, root: Path) -> None:
        words = ["--on-success", "abort", "--json", "-c", "touch made"]
        done = branching(root, "speculate", *words)
        assert (done.code, done.document["winner"], done.document["action"]) == (0, 0, "aborted")
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []

    def test_failures_can_be_kept(self, root: Path) -> None:
        words = ["--on-error", "keep", "-n", "2", "--json", "--", "sh", "-c", "touch made; exit 1"]
        done = branching(root, "best-of-n", *words)
        assert done.code == 1
        assert sorted(done.document["kept"]) == sorted(open_branches(root))
        assert len(done.document["kept"]) == 2
        for branch in done.document["kept"]:
            assert (root / f"@{branch}" / "made").exists()
            assert branching(root, "abort", branch).code == 0

    def test_at_most_so_many_run_concurrently(self, root: Path) -> None:
        """The second would win if it were started before the first has failed."""
        words = ["-c", "sleep 0.5; touch first", "-c", "touch second"]
        assert branching(root, "speculate", "--parallel", "1", *words).code == 0
        assert names(root) == ["first", NAME_FROM]

    def test_quiet_hides_the_output_of_the_candidates(self, root: Path) -> None:
        done = branching(root, "speculate", "-q", "-c", "echo x; false", "-c", "sleep 0.3")
        assert done.err == "✓ candidate 1 won · nothing to commit: no path was changed\n"
        done = branching(root, "run", "-q", "echo", "x")
        assert (done.err, done.out) == ("", "x\n")

    def test_verbose_prints_each_step_and_path(self, root: Path) -> None:
        done = branching(root, "best-of-n", "-v", "-n", "1", "touch", "made")
        assert "[0] branching: started in branch best-of-n-" in done.err
        assert "[0] branching: score 1\n" in done.err
        assert "[0] branching: committed\n" in done.err
        assert done.out.splitlines()[-1] == "  A made"
        assert "  D made" in branching(root, "run", "-v", "rm", "made").err.splitlines()


class TestSurroundings:
    def test_each_has_a_directory_for_temporary_files(self, root: Path) -> None:
        script = 'test -d "$TMPDIR" && echo x > "$TMPDIR/x" && echo "$TMPDIR"'
        done = branching(root, "best-of-n", "-n", "2", "--", "sh", "-c", script)
        assert done.code == 0, done.err

    def test_each_has_ports_of_its_own(self, root: Path) -> None:
        script = 'echo "$BRANCHING_PORT_BASE"; sleep 0.5'
        done = branching(root, "best-of-n", "-n", "4", "--", "sh", "-c", script)
        bases = [int(line.split()[1]) for line in done.err.splitlines()[:4]]
        assert len(set(bases)) == 4
        assert all(base % PORTS_EACH == 0 for base in bases)


class TestOnATerminal:
    def test_the_table_ends_with_what_was_changed(self, root: Path) -> None:
        words = ["--setup", "echo ready", "-c", "echo one; false", "-c", "sleep 0.5; touch a b"]
        done = OnTerminal(root, ["speculate", *words]).done()
        assert done.code == 0
        last = done.out[done.out.rindex("candidate  ") :]
        rows = {line.split()[0]: line for line in last.splitlines() if line.split()}
        assert "succeeded" in rows["setup"]
        assert ("failed" in rows["0"], "none" in rows["0"]) == (True, True)
        assert ("won" in rows["1"], "+2" in rows["1"]) == (True, True)

    def test_scores_are_shown_as_they_come(self, root: Path) -> None:
        words = ["-n", "2", "--", "sh", "-c", "echo 0.$BRANCHING_ATTEMPT >&3; sleep 0.5"]
        done = OnTerminal(root, ["best-of-n", *words]).done()
        assert (done.code, "0.10" in done.out, "attempt 1" in done.out) == (0, True, True)

    def test_quiet_draws_nothing(self, root: Path) -> None:
        done = OnTerminal(root, ["speculate", "-q", "-c", "true"]).done()
        assert done.out.splitlines()[0] == "  [0] ok: true"
        assert "candidate 0 won" in done.out.splitlines()[1]


class TestPorts:
    def test_a_port_range_has_one_user_at_a_time(self) -> None:
        with reserve_ports() as first, reserve_ports() as second:
            assert abs(first - second) >= PORTS_EACH

    def test_without_a_free_port_range_there_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(port_ranges, "_RANGES", 1)
        monkeypatch.setattr(port_ranges, "FIRST_PORT", 19_000)  # no other test's
        error = pytest.raises(ProcessBranchError, match="no range of 10 free ports")
        with reserve_ports(), error, reserve_ports():
            raise AssertionError("the one range was lent twice")
        with reserve_ports() as again:
            assert again == 19_000

    def test_a_port_that_is_listened_on_is_passed_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(port_ranges, "FIRST_PORT", 19_100)
        monkeypatch.setattr(port_ranges, "_RANGES", 2)
        with socket.socket() as stranger:
            stranger.bind(("", 19_105))
            stranger.listen()
            for _ in range(2):
                with reserve_ports() as base:
                    assert base == 19_110
