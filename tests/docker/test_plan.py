"""The plan as data: which docker command stands for which arguments. No Docker needed."""

from __future__ import annotations

import csv
import io
import os
import shlex
from pathlib import Path

import pytest

from branching_docker.errors import WorkspaceError
from branching_docker.plan import ContainerPlan, bind, checked_workspace, plan_run

FLAGS = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor:unconfined"]


def plan(directory: Path, *arguments: str, **options: object) -> ContainerPlan:
    """A plan with the least that can be said."""
    settings = {"name": "branching-1", "environ": {}, **options}
    return plan_run(arguments, workspace=directory, **settings)  # type: ignore[arg-type]


def test_the_whole_command_is_what_the_documentation_says(tmp_path: Path) -> None:
    assert plan(tmp_path, "run", "--", "make", "test").argv() == [
        *("docker", "run", "--rm", "--interactive", "--name", "branching-1"),
        *("--label", f"branching.workspace={tmp_path}"),
        *FLAGS,
        *("--mount", f"type=bind,src={tmp_path},dst=/src"),
        *("branching", "run", "--", "make", "test"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--", "make", "--", "-j"],
        ["run", "-h"],
        ["speculate", "-c", "a b", "-c", "", "--json"],
        ["run", "--workspace", "/elsewhere", "--image", "x", "--dry-run"],
        ["run", "--", "printf", "%s\n", "line\nbreak", "Ünï", "'\"$x"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_arguments_reach_the_container_untouched(tmp_path: Path, arguments: list[str]) -> None:
    argv = plan(tmp_path, *arguments).argv()
    assert argv[argv.index("branching") + 1 :] == arguments
    assert shlex.split(shlex.join(argv)) == argv


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        (None, None, "branching"),
        (None, "", "branching"),
        (None, "registry/mine:1", "registry/mine:1"),
        ("given", None, "given"),
        ("given", "registry/mine:1", "given"),
    ],
)
def test_the_image_is_the_option_then_the_variable_then_the_default(
    tmp_path: Path, option: str | None, variable: str | None, expected: str
) -> None:
    environ = {} if variable is None else {"BRANCHING_IMAGE": variable}
    assert plan(tmp_path, "run", image=option, environ=environ).image == expected


@pytest.mark.parametrize("tty", [True, False])
def test_only_a_terminal_gets_a_terminal(tmp_path: Path, tty: bool) -> None:
    argv = plan(tmp_path, "run", tty=tty, environ={"TERM": "xterm-256color"}).argv()
    assert "--interactive" in argv
    assert ("--tty" in argv) == ("TERM=xterm-256color" in argv) == tty


def test_only_variables_about_presentation_are_passed_on(tmp_path: Path) -> None:
    environ = {"NO_COLOR": "1", "AWS_SECRET_ACCESS_KEY": "secret", "PATH": "/bin", "COLUMNS": "100"}
    assert plan(tmp_path, "run", environ=environ).environment == ("NO_COLOR=1", "COLUMNS=100")


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "with space",
        "prø✓",
        "a,b",
        'quo"te',
        ',"',
        "line\nbreak",
        "colon:ro",
        "=",
        "back\\slash",
    ],
)
def test_docker_reads_back_the_path_that_was_meant(name: str) -> None:
    fields = next(csv.reader(io.StringIO(bind(Path("/p") / name, "/src")), strict=True))
    assert fields == ["type=bind", f"src=/p/{name}", "dst=/src"]


def test_a_workspace_is_its_real_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(real)
    for given in (
        Path(),
        Path(),
        Path("../link"),
        tmp_path / "link",
        tmp_path / "real" / ".." / "real",
    ):
        assert checked_workspace(given) == real


def test_a_workspace_that_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    refusals = {
        tmp_path / "missing": "cannot be used",
        tmp_path / "file": "is not a directory",
        tmp_path / "file" / "below": "cannot be used",
        tmp_path / "loop": "cannot be used",
        odd: "not UTF-8",
    }
    for directory, message in refusals.items():
        with pytest.raises(WorkspaceError, match=message) as refused:
            checked_workspace(directory)
        assert refused.value.exit_code == 125
        assert refused.value.hint
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(WorkspaceError, match="not readable"):
        checked_workspace(tmp_path)
