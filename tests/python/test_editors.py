"""Editors that show branches, for agents and for `branching diff --tool`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.command import branching

from branching import Workspace
from branching._difftool import EditorDetector, EditorKind

pytestmark = pytest.mark.timeout(600)
A, B, C, PARENT = Path("/a b/f"), Path("/b/f"), Path("/c/f"), Path("/p/f")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with editors that record their arguments."""
    place = tmp_path / "programs"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    for name in ("BRANCHING_DIFFTOOL", "PYDANTIC_DEEP_DIFFTOOL"):
        monkeypatch.delenv(name, raising=False)
    return place


def put(programs: Path, name: str) -> None:
    # One write: several of them run at once.
    lines = ["#!/bin/sh", f"line=$(printf '<%s>' {name} \"$@\")", 'echo "$line" >>"$TOLD"']
    (programs / name).write_text("\n".join(lines) + "\n")
    (programs / name).chmod(0o755)


def told(programs: Path) -> list[str]:
    file = programs.parent / "told"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.contract("J1")
@pytest.mark.parametrize(
    ("env", "there", "kind"),
    [
        ({}, [], "tui"),
        ({}, ["code"], "vscode"),
        ({}, ["code", "pycharm"], "pycharm"),
        ({"PYDANTIC_DEEP_DIFFTOOL": "meld {parent} {branches}"}, ["code", "pycharm"], "custom"),
        ({"BRANCHING_DIFFTOOL": "meld"}, [], "custom"),
        ({"BRANCHING_DIFFTOOL": ""}, ["code"], "vscode"),
    ],
)
def test_the_first_installed_editor_is_chosen(
    programs: Path, env: dict[str, str], there: list[str], kind: str
) -> None:
    for name in there:
        put(programs, name)
    assert EditorDetector.detect({"PATH": str(programs), **env}) == kind


@pytest.mark.contract("J2", "J3")
@pytest.mark.parametrize(
    ("kind", "parent", "branches", "lines"),
    [
        ("pycharm", PARENT, [A], ["<pycharm><diff></p/f></a b/f>"]),
        ("pycharm", PARENT, [A, B], ["<pycharm><diff></a b/f></p/f></b/f>"]),
        ("pycharm", PARENT, [A, B, C], ["<pycharm><diff></p/f></a b/f></b/f></c/f>"]),
        ("pycharm", None, [A, B], ["<pycharm><diff></a b/f></b/f>"]),
        ("vscode", PARENT, [A], ["<code><--diff></p/f></a b/f>"]),
        (
            "vscode",
            PARENT,
            [A, B],
            ["<code><--diff></p/f></a b/f>", "<code><--diff></p/f></b/f>"],
        ),
        ("vscode", None, [A, B], ["<code><--diff></a b/f></b/f>"]),
        ("vscode", None, [A], ["<code></a b/f>"]),
        ("vscode", None, [], []),
        ("tui", PARENT, [A], []),
        ("tui", None, [A], []),
    ],
)
def test_each_is_started_its_own_way(
    programs: Path,
    kind: EditorKind,
    parent: Path | None,
    branches: list[Path],
    lines: list[str],
) -> None:
    put(programs, "pycharm")
    put(programs, "code")
    processes = EditorDetector.invoke(kind, parent, branches)
    assert [process.wait() for process in processes] == [0] * len(lines)
    assert sorted(told(programs)) == sorted(lines)


@pytest.mark.contract("J1", "J3")
@pytest.mark.parametrize(
    ("command", "parent", "line"),
    [
        ("meld {parent} {branches}", PARENT, "<meld></p/f></a b/f></b/f>"),
        ("meld {branches} --base={parent}", PARENT, "<meld></a b/f></b/f><--base=/p/f>"),
        ("meld {parent} {branches}", None, "<meld></a b/f></b/f>"),
        ("meld -x", PARENT, "<meld><-x></p/f></a b/f></b/f>"),
        ("meld 'a  b' && true", PARENT, "<meld><a  b>"),
    ],
)
@pytest.mark.parametrize("is_told", ["argument", "BRANCHING_DIFFTOOL", "PYDANTIC_DEEP_DIFFTOOL"])
def test_a_command_of_the_users_is_for_the_shell(
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    parent: Path | None,
    line: str,
    is_told: str,
) -> None:
    """A file name is never executed as a command."""
    put(programs, "meld")
    put(programs, "true")
    if is_told != "argument":
        monkeypatch.setenv(is_told, command)
    custom = command if is_told == "argument" else None
    (process,) = EditorDetector.invoke("custom", parent, [A, B], custom_cmd=custom)
    assert process.wait() == 0
    assert told(programs)[0] == line


def test_a_file_s_name_is_one_word_and_no_command(programs: Path) -> None:
    put(programs, "meld")
    evil = Path("/x; touch evil $(touch evil)")
    (process,) = EditorDetector.invoke("custom", None, [evil], custom_cmd="meld {branches}")
    process.wait()
    assert told(programs) == [f"<meld><{evil}>"]


def test_a_custom_editor_needs_a_command(programs: Path) -> None:
    with pytest.raises(ValueError, match="BRANCHING_DIFFTOOL"):
        EditorDetector.invoke("custom", None, [A])


SHOW = (
    'for f in {parent} {branches}; do printf "<%s>" "$(cat "$f")"; done >>"$TOLD"; echo >>"$TOLD"'
)


@pytest.mark.contract("L12")
def test_the_files_of_a_branch_are_opened_pair_by_pair(
    real_workspace: Workspace, programs: Path
) -> None:
    """`branching diff --tool`: what was added or deleted stands beside nothing."""
    base = real_workspace.base
    for name in ("gone", "same"):
        (base / name).write_text(f"{name}\n")
    (base / "deep").mkdir()
    (base / "deep" / "old").write_text("moved\n")
    with real_workspace.branch("b", on_success=None) as branch:
        (branch.path / "seed.txt").write_text("changed\n")
        (branch.path / "gone").unlink()
        (branch.path / "n e w").write_text("new\n")
        (branch.path / "deep" / "old").rename(branch.path / "deep" / "new")
        (branch.path / "link").symlink_to("same")
        (branch.path / "empty").mkdir()
    done = branching(real_workspace.root, "diff", "b", "--tool", BRANCHING_DIFFTOOL=SHOW)
    assert (done.code, done.err) == (0, "")
    assert told(programs) == ["<moved><moved>", "<gone><>", "<><new>", "<seed><changed>"]
    done = branching(real_workspace.root, "diff", "b", "--tool", "deep", BRANCHING_DIFFTOOL=SHOW)
    assert told(programs)[4:] == ["<moved><moved>"]
    done = branching(real_workspace.root, "diff", "b", "seed.txt", "gone")
    assert done.out == "D gone\nM seed.txt\n"
    branch.abort()


def test_a_nested_branch_is_shown_beside_its_parent(
    real_workspace: Workspace, programs: Path
) -> None:
    with real_workspace.branch("outer", on_success=None) as outer:
        (outer.path / "seed.txt").write_text("outer\n")
        with outer.branch("inner", on_success=None) as inner:
            (inner.path / "seed.txt").write_text("inner\n")
    done = branching(real_workspace.root, "diff", "inner", "--tool", BRANCHING_DIFFTOOL=SHOW)
    assert (done.code, done.err) == (0, "")
    assert told(programs) == ["<outer><inner>"]
    outer.abort()


def test_an_editor_stays_as_long_as_its_files_are_there(place: Path, programs: Path) -> None:
    """The directory is mounted until the editor ends."""
    project = place / "project"
    project.mkdir()
    (project / "file").write_text("old\n")
    done = branching(
        project, "run", "-b", "b", "--on-success", "keep", "--", "sh", "-c", "echo new >file"
    )
    assert done.code == 0, done.err
    put(programs, "code")
    done = branching(project, "diff", "b", "--tool", PATH=f"{programs}:{os.environ['PATH']}")
    assert (done.code, done.err) == (0, "")
    (line,) = told(programs)
    assert line.startswith("<code><--wait><--diff><")
    assert branching(project, "abort", "b").code == 0


@pytest.mark.parametrize(
    ("words", "tool", "code", "says"),
    [
        (["--tool"], "exit 3", 125, "the editor ended with exit code 3"),
        (["--tool", "--json"], "true", 2, "--tool cannot be combined with"),
        (["--tool", "nowhere"], "true", 2, "no changed file"),
        (["--patch", "seed.txt"], "true", 2, "--patch prints the whole branch"),
    ],
)
def test_a_diff_that_the_tool_cannot_show_is_an_error(
    real_workspace: Workspace, words: list[str], tool: str, code: int, says: str
) -> None:
    with real_workspace.branch("b", on_success=None) as branch:
        (branch.path / "seed.txt").write_text("x\n")
    done = branching(real_workspace.root, "diff", "b", *words, BRANCHING_DIFFTOOL=tool)
    assert done.code == code
    assert says in done.err
    branch.abort()


def test_without_an_editor_the_error_names_the_variable_to_set(
    real_workspace: Workspace, programs: Path
) -> None:
    with real_workspace.branch("b", on_success=None) as branch:
        (branch.path / "seed.txt").write_text("x\n")
    done = branching(real_workspace.root, "diff", "b", "--tool", PATH=str(programs))
    assert done.code == 2
    assert "BRANCHING_DIFFTOOL" in done.err
    branch.abort()
