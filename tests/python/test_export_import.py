"""A branch as a patch or an archive, and back: `Branch.patch`, `.export`, `Workspace.load`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import OnTerminal, branching

from branching import BranchError, ConflictError, MountError, Workspace
from branching.fs import Branch


@pytest.fixture
def kept(real_workspace: Workspace) -> Branch:
    """An open branch with something of each kind."""
    branch = real_workspace.branch("kept", on_success=None).__enter__()
    (branch.path / NAME_FROM).write_text("seed\nand more\n")
    (branch.path / "binary").write_bytes(bytes(range(256)))
    (branch.path / "deep").mkdir()
    (branch.path / "deep" / "link").symlink_to("../binary")
    return branch


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.relative_to(root).parts[0].startswith("@")
    }


def test_lines_are_counted_on_request(kept: Branch) -> None:
    by_path = {change.path: change for change in kept.diff(count_lines=True)}
    assert by_path[NAME_FROM].lines == (1, 0)
    assert by_path["binary"].lines is None
    assert all(change.lines is None for change in kept.diff())
    kept.abort()


def test_a_patch_is_one_that_git_applies(kept: Branch, place: Path) -> None:
    with (place / "patch").open("wb") as file:
        file.write(b"# mine\n")  # what was written before comes before
        assert kept.patch(file) == 0
    copy = place / "copy"
    copy.mkdir()
    (copy / NAME_FROM).write_text("seed\n")
    subprocess.run(["git", "apply", str(place / "patch")], cwd=copy, check=True)
    assert files(copy) == files(kept.path)
    kept.abort()


def test_an_archive_makes_the_same_branch_elsewhere(
    kept: Branch, real_workspace: Workspace, place: Path
) -> None:
    with (place / "layer.tar").open("wb") as file:
        kept.export(file)
    expected = files(kept.path)
    kept.abort()
    with (place / "layer.tar").open("rb") as file:
        loaded = real_workspace.load("loaded", file)
    assert (loaded.name, loaded.is_open) == ("loaded", True)
    assert files(loaded.path) == expected
    loaded.commit()
    assert files(real_workspace.path) == expected


def test_an_archive_is_not_loaded_over_paths_that_have_changed_since(
    kept: Branch, real_workspace: Workspace, place: Path
) -> None:
    with (place / "layer.tar").open("wb") as file:
        kept.export(file)
    kept.abort()
    (real_workspace.base / NAME_FROM).write_text("written by another program\n")
    with (place / "layer.tar").open("rb") as file:
        with pytest.raises(ConflictError, match="made against other content") as caught:
            real_workspace.load("loaded", file)
        assert caught.value.paths == (NAME_FROM,)
        assert real_workspace.branches() == []
        file.seek(0)
        loaded = real_workspace.load("loaded", file, force=True)
    assert loaded.has_base_record
    assert (loaded.path / NAME_FROM).read_text() == "seed\nand more\n"
    loaded.abort()


def test_a_bad_archive_makes_nothing(real_workspace: Workspace, place: Path) -> None:
    (place / "garbage").write_bytes(b"no archive" * 1000)
    with tarfile.open(place / "evil.tar", "w") as evil:
        evil.addfile(tarfile.TarInfo("../outside"))
    for name in ("garbage", "evil.tar"):
        with (place / name).open("rb") as file, pytest.raises(MountError, match="not imported"):
            real_workspace.load("loaded", file)
    with pytest.raises(ValueError, match="cannot be the name"), (place / "garbage").open() as file:
        real_workspace.load("a/b", file)  # type: ignore[arg-type]
    assert real_workspace.branches() == []


def test_a_file_that_cannot_be_written_is_an_error(kept: Branch) -> None:
    with Path("/dev/full").open("wb") as full:
        for write in (kept.export, kept.patch):
            with pytest.raises(BranchError):
                write(full)
    kept.abort()


class TestCommands:
    @pytest.fixture
    def root(self, real: Mounted) -> Path:
        script = f"echo more >> {NAME_FROM}; echo x > made"
        words = ["-b", "kept", "--on-success", "keep", "--", "sh", "-c", script]
        assert branching(real.root, "run", *words).code == 0
        return real.root

    def test_diff_counts_and_writes_patches(self, root: Path) -> None:
        assert branching(root, "diff", "--stat", "kept").out == (
            f"A made      +1 -0\nM {NAME_FROM}  +1 -0\n"
        )
        patch = branching(root, "diff", "--patch", "kept").out
        assert "+more\n" in patch
        assert branching(root, "diff", "--patch", "--json", "kept").code == 2
        assert branching(root, "abort", "kept").code == 0

    def test_export_and_load(self, root: Path, place: Path) -> None:
        archive = str(place / "fix.tar")
        assert branching(root, "export", "kept", "-o", archive).code == 0
        assert branching(root, "export", "kept", "-o", archive).code == 125, "it is there already"
        assert branching(root, "abort", "kept").code == 0
        assert branching(root, "load", "again", archive).code == 0
        assert branching(root, "diff", "again").out == f"A made\nM {NAME_FROM}\n"
        assert branching(root, "commit", "again").code == 0
        assert (root / "made").exists()

    def test_load_lists_paths_that_have_changed_since(self, root: Path, place: Path) -> None:
        archive = str(place / "fix.tar")
        assert branching(root, "export", "kept", "-o", archive).code == 0
        with Workspace(root) as workspace:
            (workspace.base / "made").write_text("by another program\n")
        done = branching(root, "load", "again", archive)
        assert (done.code, "\n  made\n" in done.err, "--force" in done.err) == (125, True, True)
        done = branching(root, "load", "--json", "again", archive)
        assert "made against other content" in json.loads(done.err)["error"]
        assert branching(root, "abort", "again").code == 125, "no branch was made"
        done = branching(root, "load", "--force", "again", archive)
        said = "✓ loaded branch again · review: branching diff again\n"
        assert (done.code, done.err) == (0, said)
        assert branching(root, "abort", "again").code == 0
        assert branching(root, "abort", "kept").code == 0

    def test_load_notes_an_archive_without_a_record(self, root: Path, place: Path) -> None:
        archive = str(place / "foreign.tar")
        with tarfile.open(archive, "w") as foreign:
            foreign.addfile(tarfile.TarInfo("file"))
        note = "the archive does not record the state it was made from"
        for words, is_noted in (((), True), (("--json",), False), (("--force",), False)):
            done = branching(root, "load", *words, "again", archive)
            assert (done.code, note in done.err) == (0, is_noted), words
            assert branching(root, "abort", "again").code == 0
        assert branching(root, "abort", "kept").code == 0

    def test_json_does_not_mix_with_an_archive_on_standard_output(
        self, root: Path, place: Path
    ) -> None:
        with (place / "fix.tar").open("wb") as file:
            words = ["export", "--json", "kept", "-w", str(root)]
            subprocess.run([sys.executable, "-m", "branching", *words], stdout=file, check=True)
        assert tarfile.is_tarfile(place / "fix.tar")
        done = branching(root, "export", "nope", "--json")
        assert (done.code, done.out, "error" in json.loads(done.err)) == (125, "", True)
        assert branching(root, "abort", "kept").code == 0

    def test_an_export_that_fails_leaves_no_file(self, root: Path, place: Path) -> None:
        done = branching(root, "export", "nope", "-o", str(place / "none.tar"))
        assert (done.code, (place / "none.tar").exists()) == (125, False)
        assert branching(root, "abort", "kept").code == 0

    def test_an_invalid_archive_is_refused(self, root: Path) -> None:
        done = branching(root, "load", "bad", str(root / NAME_FROM))
        assert (done.code, "error: " in done.err) == (125, True)
        assert branching(root, "abort", "kept").code == 0


def test_a_step_that_takes_long_shows_activity_on_a_terminal(
    kept: Branch, real_workspace: Workspace, place: Path
) -> None:
    """The archive is a pipe into which nothing is written until the line has been seen."""
    with (place / "made.tar").open("wb") as file:
        kept.export(file)
    kept.abort()
    os.mkfifo(place / "pipe")
    load = OnTerminal(real_workspace.root, ["load", "again", str(place / "pipe")])
    load.wait_for("loading: ")
    (place / "pipe").write_bytes((place / "made.tar").read_bytes())
    done = load.done()
    assert done.code == 0, done.out
    assert "\x1b[K" in done.out
    assert "loaded branch again" in done.out
    real_workspace.reopen("again").abort()
