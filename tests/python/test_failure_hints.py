"""Hints after a command that failed because of the sandbox or the image."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from conftest import Mounted
from support.branchfs import find_program
from support.command import branching

from branching.cli.hints import RefusedWrites, advice, read_only_hint


def test_a_program_that_is_not_in_the_image_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hints(*command: str, code: int = 127) -> list[str]:
        return advice(command, code, tmp_path, refused=RefusedWrites())

    monkeypatch.delenv("BRANCHING_BRANCH", raising=False)
    assert hints("no-such-program") == []  # there is no image
    monkeypatch.setenv("BRANCHING_HOST_WORKSPACE", "/home/me/project")
    [named] = hints("no-such-program")
    assert named.startswith("'no-such-program' is not in the image; branching-docker init ")
    [inner] = hints("sh", "-c", "no-such-program")
    assert inner.startswith("a program that it starts is not in the image")
    assert hints("no-such-program", code=1) == []


@pytest.mark.parametrize(
    "script",
    ["mkdir /opt/x-of-a-tool", "echo 'Error: EROFS: read-only'; exit 1"],
    ids=["system", "node"],
)
def test_a_refused_write_outside_of_the_directory_is_explained(real: Mounted, script: str) -> None:
    done = branching(real.root, "run", "--", "sh", "-c", script)
    assert done.code == 1
    assert done.err.endswith(f"Hint: {read_only_hint(None)}\n")
    done = branching(real.root, "run", "--", "sh", "-c", f"({script}); exit 0")
    assert "Hint:" not in done.err


@pytest.mark.parametrize(
    ("output", "cache"),
    [
        ("mkdir: cannot create directory '/home/me/.cache/uv/x': Read-only file", "~/.cache/uv"),
        ("open: /home/me/.cargo/registry/a/b.crate\n\nCaused by:\n  (os error 30)", None),
        ("npm error code EROFS\nnpm error path /home/me/.npm/_cacache\nnpm error EROFS", "~/.npm"),
        ("mkdir /home/me/go/pkg/mod: Read-only file", "~/go"),
        ("/home/me/.ssh/config: Read-only file", None),
        ("/home/me/.local/share/x: Read-only file", None),
        ("/home/me2/.npm: Read-only file", None),
        ("/opt/x: Read-only file", None),
    ],
    ids=["uv", "cargo", "npm", "go", "keys", "programs", "another home", "system"],
)
def test_the_hint_for_a_refused_write_names_the_cache(
    output: str, cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    refused = RefusedWrites()
    for line in f"{output} system\n".splitlines(keepends=True):
        refused.read(line)
    [hint] = advice(["x"], 1, tmp_path, refused=refused)
    assert f"writable (--cache {cache or '~/.cargo/registry'})" in hint


def test_the_hint_of_a_worktree_names_a_repository_that_branches_do_not_see(
    tmp_path: Path,
) -> None:
    def hint(repository: str) -> str:
        (tmp_path / ".git").write_text(f"gitdir: {repository}\n")
        [text] = advice(["git"], 128, tmp_path, refused=RefusedWrites())
        return text

    assert "git does not find it. Move the repository" in hint("/tmp/project/.git/worktrees/x")
    assert "git can read it and not write to it" in hint("/home/me/project/.git/worktrees/x")


def test_a_race_explains_refused_writes_when_none_succeeds(real: Mounted) -> None:
    refused = "mkdir /opt/x-of-a-tool"
    done = branching(real.root, "speculate", "-c", refused, "-c", "exit 3")
    assert (done.code, done.err.endswith(f"Hint: {read_only_hint(None)}\n")) == (1, True), done.err
    full = "echo 'write: No space left on device'; exit 1"
    done = branching(real.root, "best-of-n", "-n", "2", "--", "sh", "-c", full)
    assert (done.code, "Hint: the disk is full; free space on it" in done.err) == (1, True)
    done = branching(real.root, "speculate", "-c", refused, "-c", "sleep 0.3; touch made")
    assert (done.code, "Hint:" in done.err) == (0, False), done.err


def test_a_program_that_the_owner_cannot_reach_is_named(
    outside: Path, as_user: tuple[int, int]
) -> None:
    """For example, a tool in a home directory, if the workspace belongs to another user."""
    tools, project = outside / "tools", outside / "project"
    for made in (tools, project):
        made.mkdir()
    (tools / "sometool").write_text("#!/bin/sh\n")
    (tools / "sometool").chmod(0o755)
    tools.chmod(0o700)
    os.chown(project, *as_user)
    environment = {"BRANCHFS": str(find_program()), "PATH": f"{tools}:{os.environ['PATH']}"}
    done = branching(project, "run", "--", "sometool", **environment)
    assert done.code in (126, 127)
    assert f"Hint: outside of the branch 'sometool' is {tools}/sometool; in a branch " in done.err
    assert f"owner (user {as_user[0]})" in done.err
    for words in (["no-such-tool"], ["sh", "-c", "exit 127"], ["./no-such-file"]):
        done = branching(project, "run", "--", *words, **environment)
        assert (done.code in (126, 127), "Hint" in done.err) == (True, False), done.err


@pytest.mark.parametrize("is_submodule", [False, True], ids=["worktree", "submodule"])
def test_git_reads_in_a_directory_whose_repository_is_elsewhere(
    outside: Path, is_submodule: bool
) -> None:
    """The state of the files is that of the branch; `git add` would have to write."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always"]
    main, tree = outside / "main", outside / "tree"
    first = outside / "first"
    at = first / "library" if is_submodule else tree
    steps = [
        ["init", "-q", str(main)],
        ["-C", str(main), "commit", "-q", "--allow-empty", "-m", "first"],
        ["init", "-q", str(first)],
        ["-C", str(first), "submodule", "--quiet", "add", str(main), "library"]
        if is_submodule
        else ["-C", str(main), "worktree", "add", "-q", str(tree)],
    ]
    for words in steps:
        subprocess.run([*git, *words], check=True, capture_output=True)
    environment = {"BRANCHFS": str(find_program())}
    script = "echo new >made && git log --format=%s && git status --short && git diff --stat"
    done = branching(at, "run", "--", "sh", "-c", script, **environment)
    assert (done.code, done.out) == (0, "first\n?? made\n"), done.err
    done = branching(at, "run", "--", "git", "add", "made", **environment)
    assert (done.code, "git worktree or submodule" in done.err) == (128, True), done.err


def test_a_submodule_is_committed_to_from_the_directory_around_it(outside: Path) -> None:
    """Its repository is then in the branch."""
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "protocol.file.allow=always"]
    main, around = outside / "main", outside / "around"
    for words in (
        ["init", "-q", str(main)],
        ["-C", str(main), "commit", "-q", "--allow-empty", "-m", "first"],
        ["init", "-q", str(around)],
        ["-C", str(around), "submodule", "--quiet", "add", str(main), "library"],
    ):
        subprocess.run([*git, *words], check=True, capture_output=True)
    commit = [*git, "-C", "library", "commit", "-q", "--allow-empty", "-m", "second"]
    done = branching(around, "run", "--", *commit, BRANCHFS=str(find_program()))
    assert done.code == 0, done.err
    log = ["git", "-C", str(around / "library"), "log", "--format=%s"]
    said = subprocess.run(log, check=True, capture_output=True, text=True)
    assert said.stdout == "second\nfirst\n"


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
