"""The changes of candidates are saved as patches when their branches end."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Running, branching
from support.forks import branch_with

from branching.runlog import patches
from branching.tui.diff.patch_sources import PatchSource


def entry_of(mounted: Mounted, label: str) -> str:
    """Returns the branch of the candidate with that label."""
    listed = json.loads(branching(mounted.root, "log", "--json").out)
    [found] = [each["branch"] for each in listed["candidates"] if label in each["label"]]
    return str(found)


def test_the_patch_of_a_loser_and_of_the_winner_can_be_applied(
    real: Mounted, tmp_path: Path
) -> None:
    before = (real.base / NAME_FROM).read_text()
    loser = f"echo loser >> {NAME_FROM}; echo new > 'a name'; exit 1"
    winner = f"echo winner >> {NAME_FROM}; sleep 0.3"
    done = branching(real.root, "speculate", "--quiet", "-c", loser, "-c", winner)
    assert done.code == 0, done.err
    for label, line in (("loser", "loser"), ("winner", "winner")):
        patch = branching(real.root, "log", entry_of(real, f"echo {label}"), "--patch")
        assert patch.code == 0, patch.err
        copy = tmp_path / label
        copy.mkdir()
        (copy / NAME_FROM).write_text(before)
        subprocess.run(["git", "apply", "-"], input=patch.out, text=True, cwd=copy, check=True)
        assert (copy / NAME_FROM).read_text() == f"{before}{line}\n"
    assert (tmp_path / "loser" / "a name").read_text() == "new\n"


def test_the_patch_of_a_loser_that_the_win_cancels_is_against_its_own_base(
    real: Mounted, tmp_path: Path
) -> None:
    before = (real.base / NAME_FROM).read_text()
    with socket.create_server(("127.0.0.1", 0)) as has, socket.create_server(("", 0)) as may:
        ports = [server.getsockname()[1] for server in (has, may)]
        loser = f"echo loser >> {NAME_FROM}; bash -c ': > /dev/tcp/127.0.0.1/{ports[0]}'; sleep 60"
        winner = f"bash -c ': $(cat < /dev/tcp/127.0.0.1/{ports[1]})'; echo winner >> {NAME_FROM}"

        def let_win() -> None:
            has.accept()[0].close()  # the loser has written
            may.accept()[0].close()

        waiting = threading.Thread(target=let_win)
        waiting.start()
        done = branching(real.root, "speculate", "--quiet", "-c", loser, "-c", winner)
        waiting.join()
    assert done.code == 0, done.err
    patch = branching(real.root, "log", entry_of(real, "echo loser"), "--patch")
    assert patch.code == 0, patch.err
    (tmp_path / NAME_FROM).write_text(before)
    subprocess.run(["git", "apply", "-"], input=patch.out, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / NAME_FROM).read_text() == f"{before}loser\n"


def test_a_candidate_that_changed_nothing_has_no_patch(real: Mounted) -> None:
    assert branching(real.root, "speculate", "--quiet", "-c", "exit 1").code == 1
    done = branching(real.root, "log", entry_of(real, "exit 1"), "--patch")
    assert (done.code, done.out) == (0, "")
    assert "no patch is kept: no change, or still open" in done.err


def test_a_long_patch_is_cut_with_a_note(real: Mounted) -> None:
    much = f"seq 200000 > much; seq 1 > {NAME_FROM}; exit 1"
    assert branching(real.root, "speculate", "--quiet", "-c", much).code == 1
    done = branching(real.root, "log", entry_of(real, "seq"), "--patch")
    assert done.code == 0, done.err
    assert len(done.out) <= patches.PATCH_BYTES_MAX + 100
    assert done.out.endswith("\n" + patches.CUT.format(patches.PATCH_BYTES_MAX))


def test_the_winners_patch_of_a_fork_is_whole_where_its_version_is_in_no_other_place(
    real: Mounted,
) -> None:
    """The file that others changed meanwhile comes last in a long patch."""
    (real.base / "zz").write_text("1\n")
    script = "seq 100000 > much; echo 2 > zz; touch begun; while [ ! -e go ]; do sleep 0.1; done"
    run = Running(real.root, ["fork", "-q", "-c", script])
    branch = branch_with(real.root, "begun", run)
    (real.base / "zz").write_text("theirs\n")
    (branch / "go").touch()
    done = run.done()
    assert done.code == 0, done.err
    found = re.search(r"the winner's version of these paths: branching (.*)", done.out)
    assert found
    patch = branching(real.root, *found[1].split()).out
    assert len(patch) > patches.PATCH_BYTES_MAX
    assert "+++ b/zz\n" in patch
    assert patch.endswith("\n+2\n"), patch[-200:]


def test_the_patch_of_a_json_document_is_text_or_null(real: Mounted) -> None:
    branching(real.root, "speculate", "--quiet", "-c", "echo x > made; exit 1", "-c", "exit 2")
    call = entry_of(real, "exit 2").rpartition("-")[0]
    found = json.loads(branching(real.root, "log", call, "--patch", "--json").out)["candidates"]
    assert [bool(each["patch"]) for each in found] == [True, False]
    assert "+x" in found[0]["patch"]


def test_patches_are_pruned_with_their_logs(real: Mounted) -> None:
    branching(real.root, "speculate", "--quiet", "-c", "echo x > made; exit 1")
    store = real.base / ".branching" / "logs"
    assert [path.suffix for path in sorted(store.glob("speculate-*"))] == [
        ".json",
        ".log",
        ".patch",
    ]
    assert branching(real.root, "prune").code == 0
    assert list(store.glob("speculate-*")) == []


def test_patch_without_a_name_is_a_usage_error(real: Mounted) -> None:
    done = branching(real.root, "log", "--patch")
    assert done.code == 2
    assert "--patch needs the name" in done.err


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository whose working tree differs from its commit in every way."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    lines = [f"line {number}" for number in range(40)]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    (tmp_path / "gone").write_text("gone\n")
    (tmp_path / "old").write_text("moved\n" * 20)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "m"], check=True)
    lines[3] = "changed"
    lines[30:32] = []
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    (tmp_path / "gone").unlink()
    (tmp_path / "old").rename(tmp_path / 'näw "q"')
    (tmp_path / "binary").write_bytes(bytes(range(255, -1, -1)))
    (tmp_path / "made").write_text("a\nb\n")
    subprocess.run([*git, "add", "-A"], check=True)
    return tmp_path


def test_a_patch_is_shown_side_by_side(repository: Path) -> None:
    """Against a patch that git itself has written."""
    words = ["git", "-C", str(repository), "diff", "--cached", "--binary", "-M"]
    sides = PatchSource("mine", subprocess.run(words, capture_output=True, check=True).stdout)
    titles = {sides.title(path) for path in sides.paths}
    assert titles == {"M text", "D gone", 'R näw "q"', "M binary", "A made"}
    assert sides.compared("binary").note == "[binary]"
    rows = sides.compared("text").rows
    assert [row.kind for row in rows if row.kind not in ("same", "hunk")] == [
        "changed",
        "removed",
        "removed",
    ]
    [changed] = [row for row in rows if row.kind == "changed"]
    assert (changed.left, changed.right) == ("line 3", "changed")
    assert (changed.left_number, changed.right_number) == (4, 4)
    removed = [(row.left, row.left_number) for row in rows if row.kind == "removed"]
    assert removed == [("line 30", 31), ("line 31", 32)]
    assert [row.right for row in sides.compared("made").rows if row.kind == "added"] == ["a", "b"]
