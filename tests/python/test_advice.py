"""What is suggested after a command that failed because of the sandbox or the image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import Mounted
from support.branchfs import find_program
from support.command import branching

from branching.cli.hints import READ_ONLY_HINT, advice


def test_a_program_that_is_not_in_the_image_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hints(*command: str, code: int = 127) -> list[str]:
        return advice(command, code, tmp_path, was_read_only=False)

    monkeypatch.delenv("BRANCHING_BRANCH", raising=False)
    assert hints("no-such-program") == []  # there is no image
    monkeypatch.setenv("BRANCHING_HOST_WORKSPACE", "/home/me/project")
    [named] = hints("no-such-program")
    assert named.startswith("'no-such-program' is not in the image; branching-docker init ")
    [inner] = hints("sh", "-c", "no-such-program")
    assert inner.startswith("a program that it runs is not in the image")
    assert hints("no-such-program", code=1) == []


@pytest.mark.parametrize(
    "script",
    ["mkdir /opt/x-of-a-tool", "echo 'Error: EROFS: read-only'; exit 1"],
    ids=["system", "node"],
)
def test_a_refused_write_outside_of_the_directory_is_explained(real: Mounted, script: str) -> None:
    done = branching(real.root, "run", "--", "sh", "-c", script)
    assert done.code == 1
    assert done.err.endswith(f"Hint: {READ_ONLY_HINT}\n")
    done = branching(real.root, "run", "--", "sh", "-c", f"({script}); exit 0")
    assert "Hint:" not in done.err


def test_a_commit_to_git_in_a_worktree_says_where_the_repository_is(outside: Path) -> None:
    """Reading works: the repository is visible, and nothing of it can be changed in a branch."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    main, tree = outside / "main", outside / "tree"
    for words in (
        ["init", "-q", str(main)],
        ["-C", str(main), "commit", "-q", "--allow-empty", "-m", "first"],
        ["-C", str(main), "worktree", "add", "-q", str(tree)],
    ):
        subprocess.run([*git, *words], check=True, capture_output=True)
    environment = {"BRANCHFS": str(find_program())}
    done = branching(tree, "run", "--", "git", "log", "--format=%s", **environment)
    assert (done.code, done.out, "Hint" in done.err) == (0, "first\n", False)
    commit = [*git, "commit", "--allow-empty", "-m", "second"]
    done = branching(tree, "run", "--", *commit, **environment)
    assert done.code == 128
    assert f"Hint: the directory is a git worktree or submodule, and its repository {main}" in (
        done.err
    )
