"""The plan as data: which docker command stands for which arguments. No Docker needed."""

from __future__ import annotations

import csv
import io
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from branching_docker.constants import SETTINGS_FILE
from branching_docker.engine_info import EngineInfo, docker_info, podman_info
from branching_docker.errors import WorkspaceError
from branching_docker.fingerprint import config_fingerprint, directory_identity
from branching_docker.plan import (
    ContainerPlan,
    bind,
    checked_workspace,
    exec_options,
    is_settled,
    plan_run,
    plan_warm,
    probe_argv,
    refused_changes,
    settings_label,
)
from branching_docker.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN"]
FLAGS = [*DEVICE, "--cap-add", "DAC_READ_SEARCH", "--security-opt", "apparmor:unconfined"]


def plan(directory: Path, *arguments: str, **options: object) -> ContainerPlan:
    """A plan with the least that can be said."""
    settings = {"name": "branching-1", "environ": {}, **options}
    return plan_run(arguments, workspace=directory, **settings)  # type: ignore[arg-type]


@pytest.mark.contract("7.3")
def test_the_whole_command_is_what_the_documentation_says(tmp_path: Path) -> None:
    assert plan(tmp_path, "run", "--", "make", "test").argv() == [
        *("docker", "run", "--rm", "--init", "--interactive", "--name", "branching-1"),
        *(
            "--label",
            f"branching.workspace={tmp_path}",
            "--label",
            f"branching.directory={directory_identity(str(tmp_path))}",
        ),
        *FLAGS,
        *("--mount", f"type=bind,src={tmp_path},dst=/src"),
        *("--env", f"BRANCHING_HOST_WORKSPACE={tmp_path}"),
        *("--env", f"BRANCHING_COMMAND_NAME=branching-docker -w {tmp_path}"),
        *("branching", "run", "--", "make", "test"),
    ]


@pytest.mark.contract("7.6")
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
        ({"volume": ("a:/a", "/etc:/b:ro")}, ["--volume", "a:/a", "--volume", "/etc:/b:ro"]),
        ({"publish": ("80:80",)}, ["--publish", "80:80"]),
        ({"env": ("A=1", "B"), "env_file": ("f",)}, ["--env-file", "f", "--env", "A=1", "--env", "B"]),
        ({"root": True}, ["--env", "BRANCHING_ROOT=1"]),
        ({"driver": "overlay"}, ["--env", "BRANCHFS_DRIVER=overlay"]),
        ({"policy": "snapshot"}, ["--env", "BRANCHFS_POLICY=snapshot"]),
        ({"name": "mine"}, ["--name", "mine"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_setting_is_dockers_own_option(tmp_path: Path, settings: dict[str, Any], words: list[str]) -> None:
    argv = plan(tmp_path, "run", settings=Settings(**settings)).argv()
    options = argv[: argv.index("branching")]
    assert any(options[start : start + len(words)] == words for start in range(len(options)))


PODMAN = podman_info(platform="linux", has_selinux=False)
SELINUX = docker_info({"SecurityOptions": ["name=seccomp,profile=default", "name=selinux"]}, platform="linux")
MACOS = docker_info({"OperatingSystem": "OrbStack"}, platform="darwin")
DESKTOP = docker_info({"OperatingSystem": "Docker Desktop"}, platform="linux")
PODMAN_MACHINE = podman_info(platform="darwin", has_selinux=False)
LABELS = ["--security-opt", "label=disable"]
MASKS = ["--security-opt", "systempaths=unconfined"]
MASKS_OF_PODMAN = ["--security-opt", "unmask=ALL"]


@pytest.mark.parametrize(
    ("info", "settings", "start", "security", "has_volume"),
    [
        (docker_info({}, platform="linux"), {}, ["docker", "run", "--rm", "--init"], [], False),
        (PODMAN, {}, ["podman", "run", "--rm", "--interactive"], [], False),
        (PODMAN, {"user": "1000"}, ["podman", "run", "--rm"], MASKS_OF_PODMAN, False),
        (SELINUX, {}, ["docker", "run", "--rm", "--init"], LABELS, False),
        (SELINUX, {"user": "1000:1000"}, ["docker"], [*LABELS, *MASKS], False),
        (docker_info({}, platform="linux"), {"user": "1000"}, ["docker"], MASKS, False),
        (docker_info({}, platform="linux"), {"user": "0:0"}, ["docker"], [], False),
        (docker_info({}, platform="linux"), {"store": "auto"}, ["docker"], [], True),
        (MACOS, {}, ["docker", "run", "--rm", "--init"], [], True),
        (MACOS, {"store": "mine"}, ["docker"], [], True),
        (DESKTOP, {}, ["docker"], [], True),
        (PODMAN_MACHINE, {}, ["podman", "run", "--rm", "--interactive"], LABELS, True),
    ],
    ids=[
        *("docker", "podman", "podman, user", "selinux", "selinux, user", "user", "root", "store"),
        *("macos", "macos, store", "desktop on linux", "podman on macos"),
    ],
)
def test_a_plan_fits_its_engine(
    tmp_path: Path,
    info: EngineInfo,
    settings: dict[str, Any],
    start: list[str],
    security: list[str],
    has_volume: bool,
) -> None:
    """Run, warm and probe alike; a volume for the store has the directory's name, or the one that was asked for."""
    asked = Settings(**settings)
    run = plan(tmp_path, "run", settings=asked, info=info).argv()
    warm = plan_warm(workspace=tmp_path, settings=asked, info=info).argv()
    probe = probe_argv(asked, tmp_path, docker=info.kind, info=info)
    assert run[: len(start)] == start
    options = ["--security-opt", "apparmor:unconfined", *security]
    for argv in (run, warm, probe):
        assert [word for place in places(argv, "--security-opt") for word in argv[place : place + 2]] == options
        assert ("--init" in argv) == (info.kind == "docker")
    assert ("--sig-proxy=false" in warm, "--sig-proxy=false" in run) == (info.kind == "podman", False)
    stores = [
        argv[place + 1] for argv in (run, warm) for place in places(argv, "--mount") if "volume" in argv[place + 1]
    ]
    assert len(stores) == (2 if has_volume else 0)
    assert len(set(stores)) == len(stores) // 2
    assert all(
        f"src={settings.get('store', 'auto').replace('auto', 'branching-store-')}" in store
        for store in stores
        if settings
    )
    assert any(word.startswith("BRANCHING_STORE=/store/") for word in run) == has_volume


def places(argv: list[str], option: str) -> list[int]:
    """Returns where an option stands."""
    return [place for place, word in enumerate(argv) if word == option]


def test_only_the_driver_fuse_goes_without_the_overlays_capability(tmp_path: Path) -> None:
    for driver in ("auto", "overlay", "fuse"):
        argv = plan(tmp_path, "run", settings=Settings(driver=driver)).argv()
        assert ("DAC_READ_SEARCH" in argv) == (driver != "fuse")


def test_the_wrappers_variable_comes_after_the_users(tmp_path: Path) -> None:
    """The last of several counts."""
    argv = plan(tmp_path, "run", settings=Settings(env=("BRANCHFS_DRIVER=x",), driver="fuse")).argv()
    assert argv.index("BRANCHFS_DRIVER=x") < argv.index("BRANCHFS_DRIVER=fuse")


@pytest.mark.parametrize(
    "make", [plan, lambda place, **given: plan_warm(workspace=place, **given)], ids=["run", "warm"]
)
def test_a_volume_that_is_not_there_is_not_left_to_docker_which_would_make_it_as_root(
    tmp_path: Path, make: Callable[..., object]
) -> None:
    with pytest.raises(WorkspaceError, match="does not exist") as refused:
        make(tmp_path, settings=Settings(volume=("named:/a", f"{tmp_path}/a b:/b")))
    assert refused.value.hint == f"mkdir -p '{tmp_path}/a b'"


def test_a_volume_without_a_place_is_not_left_to_docker_which_would_make_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="the path in the container is missing") as refused:
        plan(tmp_path, "run", settings=Settings(volume=("/data",)))
    assert refused.value.hint == "-v /data:/data"


def test_a_warm_container_has_the_same_surroundings_and_waits(tmp_path: Path) -> None:
    settings = Settings(network="none", idle="2m", env=("A=1",))
    run, warm = (
        plan(tmp_path, "x", settings=settings).argv(),
        plan_warm(workspace=tmp_path, settings=settings).argv(),
    )
    assert warm[-2:] == ["--warm", "120"]
    assert "--interactive" not in warm
    between = slice(warm.index("--device"), warm.index("branching"))
    command_name = ["--env", f"BRANCHING_COMMAND_NAME=branching-docker -w {tmp_path}"]
    assert warm[between] + command_name == run[run.index("--device") : run.index("branching")]


def test_a_warm_containers_name_follows_from_its_directory(tmp_path: Path) -> None:
    names = {plan_warm(workspace=tmp_path / name, settings=Settings()).name for name in ("a", "b", "a")}
    assert len(names) == 2


def test_each_directory_has_its_own_place_in_a_volume_and_the_place_names_the_volume(tmp_path: Path) -> None:
    said = set()
    for directory, volume in (("a", "one"), ("b", "one"), ("a", "two")):
        argv = plan(tmp_path / directory, "run", settings=Settings(store=volume)).argv()
        assert f"type=volume,src={volume},dst=/store/{volume}," in " ".join(argv)
        (place,) = [word for word in argv if word.startswith(f"BRANCHING_STORE=/store/{volume}/")]
        said.add(place)
    assert len(said) == 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), True),
        (Settings(env=("A=1", "B="), network="none"), True),
        (Settings(env=("A=1", "B")), False),
        (Settings(env_file=("f",)), False),
        (Settings(root=True), False),
    ],
)
def test_settings_that_name_changing_files_are_read_for_each_command(settings: Settings, expected: bool) -> None:
    assert is_settled(settings) == expected


def test_a_fingerprint_is_of_the_files_and_of_their_state(tmp_path: Path) -> None:
    project, user = tmp_path / "project", tmp_path / "user"
    environ = {"XDG_CONFIG_HOME": str(user)}
    seen = [config_fingerprint(str(project), environ)]
    for place, text in ((project, ""), (user, ""), (project, "a"), (user, "a")):
        place.mkdir(exist_ok=True)
        (place / SETTINGS_FILE).write_text(text)
        seen.append(config_fingerprint(str(project), environ))
    (project / SETTINGS_FILE).unlink()
    seen.append(config_fingerprint(str(project), environ))
    assert seen[0] == ""
    assert len(set(seen)) == len(seen)
    assert config_fingerprint(str(project), environ) == seen[-1]


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
    assert refused_changes(settings_label(Settings(**made)), flags) == refused


def test_settings_of_one_command_are_passed_with_it() -> None:
    settings = Settings(env=("A=1",), env_file=("f",), user="7", root=True, network="none")
    words = ["--user", "7", "--env-file", "f", "--env", "A=1", "--env", "BRANCHING_ROOT=1"]
    assert exec_options(settings) == words


@pytest.mark.parametrize("tty", [True, False])
def test_only_a_terminal_gets_a_terminal(tmp_path: Path, tty: bool) -> None:
    argv = plan(tmp_path, "run", tty=tty, environ={"TERM": "xterm-256color"}).argv()
    assert "--interactive" in argv
    assert ("--tty" in argv) == ("TERM=xterm-256color" in argv) == tty


def test_only_variables_about_presentation_are_passed_on(tmp_path: Path) -> None:
    environ = {"NO_COLOR": "1", "AWS_SECRET_ACCESS_KEY": "secret", "PATH": "/bin", "COLUMNS": "100"}
    variables = sorted(plan(tmp_path, "run", environ=environ).environment)
    assert variables == [f"BRANCHING_COMMAND_NAME=branching-docker -w {tmp_path}", "COLUMNS=100", "NO_COLOR=1"]


@pytest.mark.parametrize(
    "name", ["plain", "with space", "prø✓", "a,b", 'quo"te', ',"', "line\nbreak", "colon:ro", "=", "back\\slash"]
)
def test_docker_reads_back_the_path_that_was_meant(name: str) -> None:
    fields = next(csv.reader(io.StringIO(bind(Path("/p") / name, "/src")), strict=True))
    assert fields == ["type=bind", f"src=/p/{name}", "dst=/src"]


@pytest.mark.contract("7.6")
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
