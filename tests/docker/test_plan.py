"""The plan as data: which docker command stands for which arguments. No Docker needed."""

from __future__ import annotations

import csv
import io
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from branching_docker.errors import WorkspaceError
from branching_docker.plan import (
    ContainerPlan,
    bind,
    checked_workspace,
    enter_options,
    kept_settings,
    plan_run,
    plan_warm,
    refused_changes,
)
from branching_docker.settings import Settings

DEVICE = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN"]
FLAGS = [*DEVICE, "--cap-add", "DAC_READ_SEARCH", "--security-opt", "apparmor:unconfined"]


def plan(directory: Path, *arguments: str, **options: object) -> ContainerPlan:
    """A plan with the least that can be said."""
    settings = {"name": "branching-1", "environ": {}, **options}
    return plan_run(arguments, workspace=directory, **settings)  # type: ignore[arg-type]


def test_the_whole_command_is_what_the_documentation_says(tmp_path: Path) -> None:
    assert plan(tmp_path, "run", "--", "make", "test").argv() == [
        *("docker", "run", "--rm", "--init", "--interactive", "--name", "branching-1"),
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
    ("settings", "words"),
    [
        ({"network": "none"}, ["--network", "none"]),
        ({"user": "1000:1000"}, ["--user", "1000:1000"]),
        ({"memory": "512m"}, ["--memory", "512m"]),
        ({"cpus": "1.5"}, ["--cpus", "1.5"]),
        ({"pids_limit": "100"}, ["--pids-limit", "100"]),
        ({"platform": "linux/amd64"}, ["--platform", "linux/amd64"]),
        ({"pull": "always"}, ["--pull", "always"]),
        ({"volume": ("a:/a", "/b:/b:ro")}, ["--volume", "a:/a", "--volume", "/b:/b:ro"]),
        ({"publish": ("80:80",)}, ["--publish", "80:80"]),
        ({"env": ("A=1", "B"), "env_file": ("f",)}, ["--env-file", "f", "--env", "A=1", "--env", "B"]),
        ({"root": True}, ["--env", "BRANCHING_ROOT=1"]),
        ({"driver": "overlay"}, ["--env", "BRANCHFS_DRIVER=overlay"]),
        ({"name": "mine"}, ["--name", "mine"]),
        ({"engine": "podman"}, ["podman", "run"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_setting_is_dockers_own_option(tmp_path: Path, settings: dict[str, Any], words: list[str]) -> None:
    argv = plan(tmp_path, "run", settings=Settings(**settings)).argv()
    options = argv[: argv.index("branching")]
    assert any(options[start : start + len(words)] == words for start in range(len(options)))


def test_only_the_driver_fuse_goes_without_the_overlays_capability(tmp_path: Path) -> None:
    for driver in ("auto", "overlay", "fuse"):
        argv = plan(tmp_path, "run", settings=Settings(driver=driver)).argv()
        assert ("DAC_READ_SEARCH" in argv) == (driver != "fuse")


def test_ours_stands_behind_what_a_user_sets(tmp_path: Path) -> None:
    """The last of several counts."""
    argv = plan(tmp_path, "run", settings=Settings(env=("BRANCHFS_DRIVER=x",), driver="fuse")).argv()
    assert argv.index("BRANCHFS_DRIVER=x") < argv.index("BRANCHFS_DRIVER=fuse")


def test_a_warm_container_has_the_same_surroundings_and_waits(tmp_path: Path) -> None:
    settings = Settings(network="none", idle="2m", env=("A=1",))
    run, warm = (
        plan(tmp_path, "x", settings=settings).argv(),
        plan_warm(workspace=tmp_path, settings=settings).argv(),
    )
    assert warm[-2:] == ["--warm", "120"]
    assert "--interactive" not in warm
    between = slice(warm.index("--device"), warm.index("branching"))
    assert warm[between] == run[run.index("--device") : run.index("branching")]


def test_a_warm_containers_name_follows_from_its_directory(tmp_path: Path) -> None:
    names = {plan_warm(workspace=tmp_path / name, settings=Settings()).name for name in ("a", "b", "a")}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("made", "given", "refused"),
    [
        ({}, {}, []),
        ({}, {"network": "none"}, ["--network"]),
        ({"network": "none"}, {"network": "none"}, []),
        ({"network": "none"}, {}, []),
        ({"volume": ("a:/a",)}, {"volume": ["a:/a"]}, []),
        ({}, {"volume": ("a:/a",), "image": "other"}, ["--image", "--volume"]),
        ({}, {"image": "branching", "env": ("A=1",), "env_file": ("f",), "root": True, "user": "1"}, []),
    ],
)
def test_a_command_may_not_ask_a_warm_container_for_what_it_is_not(
    made: dict[str, Any], given: dict[str, object], refused: list[str]
) -> None:
    flags = dict.fromkeys(vars(Settings())) | given
    assert refused_changes(kept_settings(Settings(**made)), flags) == refused


def test_what_holds_for_one_command_goes_with_it() -> None:
    settings = Settings(env=("A=1",), env_file=("f",), user="7", root=True, network="none")
    words = ["--user", "7", "--env-file", "f", "--env", "A=1", "--env", "BRANCHING_ROOT=1"]
    assert enter_options(settings) == words


@pytest.mark.parametrize("tty", [True, False])
def test_only_a_terminal_gets_a_terminal(tmp_path: Path, tty: bool) -> None:
    argv = plan(tmp_path, "run", tty=tty, environ={"TERM": "xterm-256color"}).argv()
    assert "--interactive" in argv
    assert ("--tty" in argv) == ("TERM=xterm-256color" in argv) == tty


def test_only_variables_about_presentation_are_passed_on(tmp_path: Path) -> None:
    environ = {"NO_COLOR": "1", "AWS_SECRET_ACCESS_KEY": "secret", "PATH": "/bin", "COLUMNS": "100"}
    assert sorted(plan(tmp_path, "run", environ=environ).environment) == ["COLUMNS=100", "NO_COLOR=1"]


@pytest.mark.parametrize(
    "name", ["plain", "with space", "prø✓", "a,b", 'quo"te', ',"', "line\nbreak", "colon:ro", "=", "back\\slash"]
)
def test_docker_reads_back_the_path_that_was_meant(name: str) -> None:
    fields = next(csv.reader(io.StringIO(bind(Path("/p") / name, "/src")), strict=True))
    assert fields == ["type=bind", f"src=/p/{name}", "dst=/src"]


def test_a_workspace_is_its_real_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(real)
    for given in (Path(), Path(), Path("../link"), tmp_path / "link", tmp_path / "real" / ".." / "real"):
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
