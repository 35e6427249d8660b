"""The doctor: machines of every kind as data, and this one for real."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from branching_docker import __version__
from branching_docker.doctor import Finding, judge_container, judge_engine, judge_image, judge_repository
from conftest import WRAPPER

if TYPE_CHECKING:
    from project_snapshot import Project


def docker_facts(info: dict[str, Any] | None = None, version: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns what `docker info` reports on an ordinary machine, with changes."""
    told = {"OperatingSystem": "Debian GNU/Linux 12", "OSType": "linux", "KernelVersion": "6.1", "CgroupVersion": "2"}
    return {
        "name": "docker",
        "command": "/usr/bin/docker",
        "at": "/var/run/docker.sock",
        "version": {"Version": "28.2", "ApiVersion": "1.50", **(version or {})},
        "info": {**told, "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin"], **(info or {})},
    }


def states(found: list[Finding]) -> dict[str, str]:
    """What is said of what."""
    return {finding.name: finding.state for finding in found}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (docker_facts(), {"engine": "ok", "AppArmor": "ok", "limits": "ok"}),
        (docker_facts({"CgroupVersion": None}), {"engine": "ok", "AppArmor": "ok", "limits": "ok"}),
        (docker_facts(version={"ApiVersion": "1.39"}), {"engine": "missing"}),
        (docker_facts({"OSType": "windows"}), {"engine": "missing"}),
        (docker_facts({"OperatingSystem": "Docker Desktop"}), {"engine": "ok", "AppArmor": "ok", "limits": "ok"}),
        (
            docker_facts({"SecurityOptions": ["name=seccomp", "name=rootless"]}),
            {"engine": "ok", "users": "warning", "AppArmor": "ok", "limits": "ok"},
        ),
        (
            docker_facts({"SecurityOptions": ["name=userns", "name=selinux"]}),
            {"engine": "ok", "users": "warning", "SELinux": "warning", "AppArmor": "ok", "limits": "ok"},
        ),
        (docker_facts({"SecurityOptions": None}), {"engine": "ok", "AppArmor": "ok", "limits": "ok"}),
        ({"name": "podman", "command": "/usr/bin/podman"}, {"engine": "ok"}),
    ],
    ids=["debian", "cgroup v1", "old", "windows", "desktop", "rootless", "remapped, selinux", "bare", "podman"],
)
def test_an_engine_is_judged_by_its_reported_facts(facts: dict[str, Any], expected: dict[str, str]) -> None:
    found = judge_engine(facts)
    assert states(found) == expected
    assert all(finding.hint for finding in found if finding.state != "ok"), "each says what to do"


@pytest.mark.parametrize(
    ("labels", "state"),
    [
        (None, "missing"),
        ({}, "warning"),
        ({"org.opencontainers.image.version": "0.1.0"}, "warning"),
        ({"org.opencontainers.image.version": __version__}, "ok"),
    ],
)
def test_an_image_is_judged_by_its_version(labels: dict[str, str] | None, state: str) -> None:
    found = judge_image("branching", labels)
    assert found.state == state
    assert (found.hint == "") == (state == "ok")


@pytest.mark.parametrize(
    ("kind", "room", "directory", "space"),
    [
        ("ext4", 5 << 30, "ok", "ok"),
        ("ext4", 5 << 20, "ok", "warning"),
        ("virtiofs", 5 << 30, "warning", "ok"),
        ("fuse.fakeowner", 5 << 30, "warning", "ok"),
        ("9p", 5 << 30, "warning", "ok"),
    ],
)
def test_a_directory_is_judged_by_what_carries_it(kind: str, room: int, directory: str, space: str) -> None:
    checks = [
        {"name": "/dev/fuse", "state": "ok", "detail": "can be opened"},
        {"name": "limit on memory", "state": "limited", "detail": "no", "hint": "do"},
        {"name": "mount", "state": "missing", "detail": "no", "hint": "do"},
    ]
    told = {"checks": checks, "directory": {"kind": kind, "room": room, "owner": "1000:1000"}}
    assert states(judge_container(told, Path("/project"))) == {
        "inside: /dev/fuse": "ok",
        "inside: limit on memory": "warning",
        "inside: mount": "missing",
        "directory": directory,
        "room": space,
    }
    assert len(judge_container({**told, "directory": None}, None)) == len(checks)


@pytest.mark.parametrize("told", [{"kind": "overlay"}, {"kind": "ext4", "is_read_only": True}], ids=str)
def test_a_directory_that_branches_cannot_be_kept_in_is_missing(told: dict[str, Any]) -> None:
    found = judge_container({"checks": [], "directory": {"room": 5 << 30, "owner": "0:0", **told}}, Path("/project"))
    assert states(found)["directory"] == "missing"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("gitdir: /elsewhere/.git/worktrees/x\n", ["warning"]),
        ("gitdir: ../.git/modules/x\n", ["warning"]),
        ("gitdir: .repository\n", []),
        ("", []),
        (None, []),
    ],
    ids=["worktree", "submodule", "inside", "empty", "none"],
)
def test_a_repository_outside_of_the_directory_is_reported(
    tmp_path: Path, content: str | None, expected: list[str]
) -> None:
    if content is not None:
        (tmp_path / ".git").write_text(content)
    assert [finding.state for finding in judge_repository(tmp_path)] == expected


def test_the_doctor_finds_this_machine_well(image: str, project: Project) -> None:
    before = project.tree()
    told = subprocess.run(
        [WRAPPER, "--image", image, "-w", project.root, "doctor"], capture_output=True, text=True, timeout=180
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "ok       inside: mount: a directory was mounted, branched, committed and undone" in told.stdout
    assert "commands run as 1000:1000" in told.stdout
    assert project.tree() == before


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DOCKER_HOST": "unix:///nowhere/docker.sock"}, "does not answer at unix:///nowhere/docker.sock"),
        ({"DOCKER_HOST": "ssh://me@far"}, "on another machine"),
        ({"PATH": str(WRAPPER.parent)}, "docker command is not installed"),
        ({"BRANCHING_IMAGE": "no-such-image"}, '"no-such-image" is not on this machine'),
    ],
)
def test_the_doctor_says_what_is_missing(environ: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    told = subprocess.run([WRAPPER, "doctor"], capture_output=True, text=True, timeout=180)
    assert told.returncode == 1
    assert "missing  " in told.stdout
    assert said in told.stdout
    assert "Hint: " in told.stdout
