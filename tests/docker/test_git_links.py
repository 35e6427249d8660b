"""A git worktree or submodule in a container: git finds its repository, and only if that is really its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker.doctor import judge_repository
from branching_docker.git_links import repository
from branching_docker.plan import plan_run, plan_warm
from branching_docker.settings import Settings
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Iterator

GIT = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always"]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that no sandbox hides, as it does /tmp: where most projects lie."""
    path = Path(tempfile.mkdtemp(prefix="branching-test-", dir="/opt"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def git(*words: object) -> None:
    """Runs git, which has to succeed."""
    subprocess.run([*GIT, *map(str, words)], check=True, capture_output=True)


def make(place: Path) -> tuple[Path, Path, Path]:
    """Makes a repository, a worktree of it, and another with the first as a submodule."""
    main, tree, super_ = place / "main", place / "tree", place / "super"
    git("init", "-q", main)
    git("-C", main, "commit", "-q", "--allow-empty", "-m", "first")
    git("-C", main, "worktree", "add", "-q", tree)
    git("init", "-q", super_)
    git("-C", super_, "submodule", "--quiet", "add", main, "library")
    return main, tree, super_ / "library"


def test_the_repository_is_mounted_where_it_is_and_cannot_be_written(place: Path) -> None:
    """So the doctor has no warning about it."""
    main, tree, library = make(place)
    assert repository(main) is None
    assert [judge_repository(workspace) for workspace in (main, tree, library)] == [[], [], []]
    for workspace, found in ((tree, main / ".git"), (library, place / "super" / ".git" / "modules" / "library")):
        assert repository(workspace) == found
        for plan in (
            plan_run(["run"], workspace=workspace, name="n", environ={}),
            plan_warm(workspace=workspace, settings=Settings()),
        ):
            assert f"type=bind,src={found},dst={found},readonly" in plan.argv()


def test_a_repository_that_does_not_name_the_worktree_is_not_mounted(place: Path) -> None:
    """The `.git` file names a repository without a link back, or a directory that is not a repository."""
    main, tree, library = make(place)
    for target in (main / ".git", main / ".git" / "worktrees" / "tree", library, "/etc", "/", ".", ""):
        stranger = place / "stranger"
        stranger.mkdir(exist_ok=True)
        (stranger / ".git").write_text(f"gitdir: {target}\n")
        assert repository(stranger) is None
    forged = place / "stranger" / "forged"
    (forged / "objects").mkdir(parents=True)
    (forged / "gitdir").write_text(f"{place}/stranger/.git\n")
    (forged / "commondir").write_text("/etc\n")
    (place / "stranger" / ".git").write_text("gitdir: forged\n")
    assert repository(place / "stranger") is None
    (forged / "commondir").write_text(f"{main}/.git\n")
    assert repository(place / "stranger") is None
    assert repository(tree) is not None


@pytest.mark.parametrize("is_warm", [False, True], ids=["", "warm"])
def test_git_reads_the_repository_of_a_worktree_in_a_container(image: str, place: Path, is_warm: bool) -> None:
    _, tree, _ = make(place)
    command = [str(WRAPPER), "--image", image, "-w", str(tree)]
    if is_warm:
        subprocess.run([*command, "up"], check=True, capture_output=True)
    try:
        done = subprocess.run([*command, "run", "--", "git", "log", "--format=%s"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "first\n"), done.stderr
        words = [*GIT, "commit", "--allow-empty", "-m", "second"]
        done = subprocess.run([*command, "run", "--", *words], capture_output=True, text=True)
        assert done.returncode == 128
        assert "Hint: the directory is a git worktree or submodule" in done.stderr
        assert {path.name for path in tree.iterdir()} <= {".git", ".branching"}
    finally:
        subprocess.run([*command, "down"], capture_output=True)


@pytest.mark.parametrize("is_warm", [False, True], ids=["", "warm"])
def test_a_program_that_the_image_lacks_is_named(image: str, place: Path, is_warm: bool) -> None:
    command = [str(WRAPPER), "--image", image, "-w", str(place)]
    if is_warm:
        subprocess.run([*command, "up"], check=True, capture_output=True)
    try:
        done = subprocess.run([*command, "run", "--", "pytest"], capture_output=True, text=True)
        assert done.returncode == 127
        assert "Hint: 'pytest' is not in the image; branching-docker init " in done.stderr
    finally:
        subprocess.run([*command, "down"], capture_output=True)
