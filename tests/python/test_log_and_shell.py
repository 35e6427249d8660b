"""`branching log` and `branching shell`: logs of candidates, and shells in kept branches."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import OnTerminal, branching

from branching.fs import DiffSummary
from branching.patterns import Event
from branching.runlog import run_log
from branching.runlog.run_log import RunLog, read_entries


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


@pytest.fixture
def store(real: Mounted) -> Path:
    return real.base / ".branching"


class TestLog:
    def test_output_of_dropped_branches_is_kept(self, root: Path) -> None:
        words = ["-c", "echo one; echo two >&2; exit 3", "-c", "sleep 0.3; echo three"]
        assert branching(root, "speculate", *words).code == 0
        first, second = branching(root, "log").out.splitlines()
        assert first.split()[1] == "failed"
        assert second.split()[1] == "won"
        assert second.endswith("sleep 0.3; echo three")
        name = first.split()[0]
        assert branching(root, "log", name).out == "one\ntwo\n"
        call = name.removesuffix("-0")
        assert branching(root, "log", call).out == "[0] one\n[0] two\n[1] three\n"

    def test_its_documents(self, root: Path) -> None:
        words = ["--", "sh", "-c", "echo x; touch made; echo 0.5 >&3"]
        assert branching(root, "best-of-n", "-n", "1", *words).code == 0
        [listed] = branching(root, "log", "--json").document["candidates"]
        assert listed["command"] == "best-of-n"
        assert (listed["state"], listed["score"], listed["changes"]) == ("won", 0.5, "1 added")
        [shown] = branching(root, "log", "--json", listed["branch"]).document["candidates"]
        assert shown == {**listed, "output": "x\n"}

    def test_a_name_without_output_is_a_wrong_call(self, root: Path) -> None:
        assert branching(root, "log").out == ""
        done = branching(root, "log", "nope")
        assert (done.code, "'nope'" in done.err) == (2, True)

    def test_the_log_belongs_to_the_stores_owner_and_is_removed_with_the_store(
        self, root: Path, store: Path, as_user: tuple[int, int]
    ) -> None:
        os.chown(store.parent, *as_user)
        book = RunLog(store, as_user, "speculate")
        with book:
            listener = book.and_then(lambda event: None)
            listener(event("started"))
            listener(event("output", text="x"))
        for path in (store / "logs", *(store / "logs").iterdir()):
            found = path.stat()
            assert (found.st_uid, found.st_gid) == as_user
            assert found.st_mode & 0o077 == 0


def event(kind: str, index: int = 0, **facts: object) -> Event:
    return Event(kind=kind, index=index, branch=f"call-{index}", **facts)  # type: ignore[arg-type]


class TestLogbook:
    """The writer on its own, on plain directories."""

    @pytest.fixture
    def owner(self) -> tuple[int, int]:
        return os.geteuid(), os.getegid()

    def write(self, store: Path, *events: Event) -> list[Event]:
        heard: list[Event] = []
        with RunLog(store, (os.geteuid(), os.getegid()), "speculate") as book:
            listener = book.and_then(heard.append)
            for each in events:
                listener(each)
        return heard

    def test_the_entry_of_a_candidate_has_its_result(self, tmp_path: Path) -> None:
        self.write(
            tmp_path,
            event("started", label="cmd"),
            event("output", text="x\ud800"),
            event(
                "finished", state="succeeded", seconds=1.5, changes=DiffSummary(added=2, deleted=1)
            ),
            event("scored", state="succeeded", score=0.5),
            event("committed", state="won"),
        )
        [entry] = read_entries(tmp_path / "logs")
        assert (entry.state, entry.seconds, entry.score) == ("won", 1.5, 0.5)
        assert (entry.label, entry.changes, entry.call) == ("cmd", "2 added, 1 deleted", "call")
        assert (tmp_path / "logs" / "call-0.log").read_text() == "x?\n"

    @pytest.mark.parametrize("each_alone", [True, False], ids=["lines", "blocks"])
    def test_long_output_is_cut(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_alone: bool
    ) -> None:
        monkeypatch.setattr(run_log, "LOG_BYTES_MAX", 100)
        lines = [event("output", text="x" * 39) for _ in range(10)]
        block = event("output", text="\n".join(line.text for line in lines))
        self.write(tmp_path, event("started"), *(lines if each_alone else [block, block]))
        told = (tmp_path / "logs" / "call-0.log").read_text().splitlines()
        assert told == ["x" * 39, "x" * 39, "[log truncated at 100 bytes]"]

    def test_the_oldest_make_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run_log, "ENTRIES_MAX", 3)
        for index in range(6):
            self.write(tmp_path, event("started", index))
            os.utime(tmp_path / "logs" / f"call-{index}.json", (index, index))
        kept = sorted(path.name for path in (tmp_path / "logs").iterdir())
        assert kept == [f"call-{i}.{kind}" for i in (3, 4, 5) for kind in ("json", "log")]

    def test_a_log_that_cannot_be_written_warns_once_and_does_not_stop_the_call(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "logs" / "call-0.log").mkdir(parents=True)
        heard = self.write(tmp_path, event("started"), event("output", text="x"), event("kept"))
        assert [each.kind for each in heard] == ["started", "output", "kept"]
        assert capsys.readouterr().err.count("output is no longer recorded") == 1

    def test_a_link_in_the_way_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        """The owner of the directory may have created the link."""
        (tmp_path / "logs").mkdir()
        target = tmp_path / "target"
        target.write_text("mine")
        log = tmp_path / "logs" / "call-0.log"
        log.symlink_to(target)
        self.write(tmp_path, event("started"), event("output", text="x"))
        assert (target.read_text(), log.read_text(), log.is_symlink()) == ("mine", "x\n", False)

    def test_a_directory_that_is_a_link_is_not_followed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
        self.write(tmp_path, event("started"))
        assert "output is no longer recorded" in capsys.readouterr().err
        assert list((tmp_path / "elsewhere").iterdir()) == []

    def test_without_a_store_in_sight_nothing_is_kept(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.write(tmp_path / "hidden", event("started"), event("output", text="x"))
        assert capsys.readouterr().err == ""

    def test_strangers_files_are_no_entries(self, tmp_path: Path) -> None:
        self.write(tmp_path, event("started"))
        (tmp_path / "logs" / "other.json").write_text("{")
        (tmp_path / "logs" / "another.json").write_text(json.dumps({"a": 1}))
        assert len(read_entries(tmp_path / "logs")) == 1


class TestShell:
    def test_a_kept_branch_is_entered_and_stays(self, root: Path) -> None:
        assert branching(root, "run", "-b", "mine", "--on-success", "keep", "touch", "a").code == 0
        done = branching(root, "shell", "mine", SHELL="/bin/sh", stdin="touch b; ls; exit 3\n")
        assert (done.code, done.out) == (3, f"a\nb\n{NAME_FROM}\n")
        assert "Hint: branching diff mine" in done.err
        assert branching(root, "diff", "mine").out == "A a\nA b\n"
        assert branching(root, "commit", "mine").code == 0

    def test_shell_runs_a_given_command_instead(self, root: Path) -> None:
        assert branching(root, "run", "-b", "mine", "--on-success", "keep", "touch", "a").code == 0
        done = branching(root, "shell", "mine", "--", "sh", "-c", "echo $BRANCHING_BRANCH -x")
        assert (done.code, done.out) == (0, "mine -x\n")
        assert branching(root, "shell", "mine", "no-such-program").code == 127
        assert branching(root, "abort", "mine").code == 0

    def test_without_a_name_there_is_a_new_branch(self, root: Path) -> None:
        run = OnTerminal(root, ["shell"], SHELL="/bin/sh", PS1="in> ")
        run.wait_for("in> ")
        run.type("touch made; exit\n")
        done = run.done()
        assert (done.code, " kept branch shell-" in done.out) == (0, True)
        [entry] = branching(root, "ls", "--json").document["branches"]
        assert branching(root, "commit", entry["name"]).code == 0
        assert (root / "made").exists()

    def test_a_branch_that_is_not_there_is_named(self, root: Path) -> None:
        done = branching(root, "shell", "nope")
        assert (done.code, "no branch 'nope' is open" in done.err) == (125, True)


class TestForget:
    def test_logs_of_ended_calls_go_and_those_of_running_calls_stay(self, tmp_path: Path) -> None:
        book = RunLog(tmp_path, (os.geteuid(), os.getegid()), "speculate", keeps_store=True)
        with book:
            listener = book.and_then(lambda event: None)
            listener(event("started"))
            listener(event("output", text="x"))
            before = sorted((tmp_path / "logs").iterdir())
            run_log.forget(tmp_path / "logs")
            assert sorted((tmp_path / "logs").iterdir()) == before
        run_log.forget(tmp_path / "logs")  # it was never finished, and nobody answers for it
        assert list((tmp_path / "logs").iterdir()) == []
        run_log.forget(tmp_path / "nothing")

    def test_it_follows_no_link_and_leaves_other_files(self, tmp_path: Path) -> None:
        other, logs = tmp_path / "other", tmp_path / "logs"
        other.mkdir()
        (other / "package.json").write_text("{}")
        logs.symlink_to(other)
        with pytest.raises(NotADirectoryError):
            run_log.forget(logs)
        run_log.forget(other)
        assert [path.name for path in other.iterdir()] == ["package.json"]
