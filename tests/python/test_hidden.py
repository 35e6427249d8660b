"""Files that a sandbox hides: found whole or not at all, and hidden as long as anything runs."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from branching import BranchContext, NamespaceError, ProcessBranchError, Workspace
from branching.process.sandbox import masked_files


def test_globs_say_which(tmp_path: Path) -> None:
    for name in ("deep/er/.env", "deep/plain", ".env", "key.pem", "deep/key.pem", "secrets/one"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = masked_files.find(str(tmp_path), ["**/.env", "*.pem", "secrets"])
    assert sorted(found) == sorted(
        str(tmp_path / name) for name in (".env", "deep/er/.env", "key.pem", "secrets")
    )


def test_a_link_is_followed_and_one_to_nothing_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "a.env").symlink_to("real")
    (tmp_path / "b.env").symlink_to("nothing")
    (tmp_path / "c.env").symlink_to("c.env")
    assert masked_files.find(str(tmp_path), ["*.env"]) == [str(tmp_path / "real")]


def test_other_names_of_the_same_file_are_hidden_too(tmp_path: Path) -> None:
    """Hard links, of a file and of what is in a hidden directory; a copy is another file."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "deep").mkdir()
    for name in (".env", "secrets/key", "plain"):
        (tmp_path / name).write_text("x")
    (tmp_path / "deep" / "env.txt").hardlink_to(tmp_path / ".env")
    (tmp_path / "key.txt").hardlink_to(tmp_path / "secrets" / "key")
    (tmp_path / "plain2").hardlink_to(tmp_path / "plain")
    found = masked_files.find(str(tmp_path), [".env", "secrets"])
    assert sorted(os.path.relpath(path, tmp_path) for path in found) == [
        ".env",
        "deep/env.txt",
        "key.txt",
        "secrets",
    ]


def test_a_listed_name_that_no_longer_exists_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may reappear and would then be readable."""
    listed = masked_files._Listing(None, [f"{tmp_path}/.env"], [])
    monkeypatch.setattr(masked_files.Finder, "_listed", lambda *_: listed)
    with pytest.raises(OSError, match="another process is changing it") as caught:
        masked_files.find(str(tmp_path), [".env"])
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("lost", ["a name", "a directory"])
def test_a_tree_that_changes_during_the_search_for_hard_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """One of them may have been there."""
    (tmp_path / ".env").touch()
    (tmp_path / "other").hardlink_to(tmp_path / ".env")

    def walk(top: str, onerror: Any = None) -> Iterator[tuple[str, list[str], list[str]]]:
        if lost == "a directory" and onerror is not None:
            onerror(PermissionError(errno.EACCES, "closed meanwhile"))
        gone = ["gone"] if lost == "a name" else []
        yield top, [], [".env", "other", *gone]

    monkeypatch.setattr(os, "walk", walk)
    with pytest.raises(OSError, match=r"another process is changing it|closed meanwhile"):
        masked_files.find(str(tmp_path), [".env"])


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        masked_files.find(str(tmp_path / "none"), ["**/.env"])


def test_nothing_runs_when_files_cannot_be_hidden(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace, directories that only other users can read cannot be listed."""
    from branching.process.sandbox import parent_state

    monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    with real_workspace.branch("b", on_success=None) as branch:
        closed = branch.path / "closed"
        closed.mkdir(mode=0o700)
        os.chown(closed, 12345, 12346)
        with (
            pytest.raises(NamespaceError, match="hiding files of the workspace"),
            BranchContext(["touch", "ran"], branch, hide=["**/.env"]),
        ):
            pass
        assert not (branch.path / "ran").exists()
        branch.abort()


def test_the_end_of_a_sibling_uncovers_nothing(real_workspace: Workspace) -> None:
    """The kernel takes covers away with names that the file system calls outdated: of the branch
    that ends, and of no other."""
    (real_workspace.path / ".env").write_text("secret\n")
    said: list[bytes] = []
    is_ready = threading.Event()

    def hear(arrived: bytes) -> None:
        said.append(arrived)
        if b"ready" in arrived:
            is_ready.set()

    script = "cat .env; echo ready; until [ -e go ]; do sleep 0.01; done; cat .env; true"
    with (
        real_workspace.branch("sibling", on_success=None) as sibling,
        real_workspace.branch("b", on_success=None) as branch,
    ):
        context = BranchContext(
            ["sh", "-c", script], branch, hide=["**/.env"], stdout=hear, stderr=hear
        )
        with context:
            waiter = threading.Thread(target=_wait, args=(context,))
            waiter.start()
            assert is_ready.wait(60), said
            sibling.abort()
            (branch.path / "go").touch()
            waiter.join()
            ended = context.result
        branch.abort()
    assert ended.success, (ended, said)
    assert b"".join(said).count(b"denied") == 2, said


def test_a_file_that_loses_its_cover_ends_the_sandbox(real_workspace: Workspace) -> None:
    """A program outside removes the name, and its cover is removed with it."""
    (real_workspace.path / ".env").write_text("secret\n")
    with real_workspace.branch("b", on_success=None) as branch:
        context = BranchContext(["sleep", "600"], branch, hide=["**/.env"])
        with context:
            (branch.path / ".env").unlink()
            with pytest.raises(ProcessBranchError, match="no longer hidden"):
                context.wait(60)
            assert context.result.ended == "error"
        branch.abort()


def _wait(context: BranchContext) -> None:
    try:
        context.wait()
    except ProcessBranchError:
        pass  # the result tells more


def make_tree(top: Path) -> None:
    for name in ("a/b", "c"):
        (top / name).mkdir(parents=True)
    for name in ("a/file", "a/b/file", "c/.env", "c/plain", "c/other"):
        (top / name).write_text("x")
    time.sleep(0.05)  # what has just changed is looked at again


def test_a_directory_is_listed_again_only_if_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tree(tmp_path)
    listed: list[str] = []
    scandir = os.scandir

    def counted(path: str) -> Any:
        listed.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    finder = masked_files.Finder(str(tmp_path), ["**/.env"])
    assert not finder.hides("c/plain")
    assert len(listed) == 4
    listed.clear()
    assert not finder.hides("a/file")
    assert listed == []
    (tmp_path / "a" / ".env").symlink_to("../c/plain")
    assert finder.hides("c/plain")
    assert listed == [f"{tmp_path}/a"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda top: None, "c/.env"),
        (lambda top: (top / "a/b/.env").mkdir(), "a/b/.env/inside"),
        (lambda top: (top / "c/link").hardlink_to(top / "c/.env"), "c/link"),
        (lambda top: (top / "a/b/.env").symlink_to("../../c/plain"), "c/plain"),
        (lambda top: (top / "a/b/.env").symlink_to("../../c"), "c/other"),
        (lambda top: (top / "c/other").rename(top / "a/.env"), "a/.env"),
        (
            lambda top: [
                (top / "a").rename(top / "d"),
                (top / "d/.env").hardlink_to(top / "c/other"),
            ],
            "c/other",
        ),
    ],
    ids=["a name", "below", "a hard link", "a link", "a link above", "renamed", "in a moved one"],
)
def test_a_change_since_the_last_question_is_seen(
    tmp_path: Path, change: Callable[[Path], object], path: str
) -> None:
    make_tree(tmp_path)
    finder = masked_files.Finder(str(tmp_path), ["**/.env"])
    assert not finder.hides("a/file")
    change(tmp_path)
    assert finder.hides(path)
    found = masked_files.find(str(tmp_path), ["**/.env"])
    assert {str(tmp_path / path), *map(str, (tmp_path / path).parents)} & set(found)
