"""Limits inside the image, with the documented flags alone: Docker shows the control groups read-only there.

Whichever version of control groups the machine has is tested; tests/vm/containers does it with version 2.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from conftest import WRAPPER
from image_container import PRIVILEGE, UNMASKED, run_as_owner, run_image

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import docker

    from project_snapshot import Project

RUN_SECONDS = 120
HOG = ["python3", "-c", "held = bytearray(200 << 20); open('made', 'w').close()"]


@pytest.fixture(scope="module")
def version(engine: docker.DockerClient) -> int:
    """The version of control groups that the engine's containers have."""
    return int(engine.info().get("CgroupVersion", "1"))


@pytest.mark.contract("3.15")
def test_a_hog_is_killed_and_nothing_of_it_committed(image: str, project: Project) -> None:
    """32 MiB are allowed, 200 MiB are used; the published image lets it pass and commits."""
    before = project.tree()
    done = run_image(image, "run", "--memory-limit", "32M", "--json", "--", *HOG, project=project)
    assert (done.returncode, project.tree()) == (137, before), done.stderr
    assert json.loads(done.stdout)["ended"] == "oom"
    assert "out of memory" in done.stderr


def test_each_candidate_meets_its_own_limit(image: str, project: Project) -> None:
    """All limits are on; the last candidate keeps to them and wins."""
    forks = "for i in $(seq 60); do sleep 60 & done; exit 1"
    fills = "dd if=/dev/zero of=filled bs=64k count=100 status=none"
    limits = [
        "--memory-limit",
        "64M",
        "--pids-limit",
        "40",
        "--disk-limit",
        "1M",
        "--cpu-limit",
        "0.9",
    ]
    limits += ["--group-memory-limit", "512M", "--group-cpu-limit", "1.5"]
    candidates = ["-c", fills, "-c", forks, "-c", "touch won"]
    done = run_image(image, "speculate", *limits, "--parallel", "1", "--json", *candidates, project=project)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [each["ended"] for each in told["results"]] == ["disk", "pids", "exit"]
    assert told["winner"] == 2
    assert (project.root / "won").exists()


@pytest.mark.parametrize("limit", ["--memory-limit=64M", "--pids-limit=40", "--cpu-limit=0.5"])
def test_one_limit_needs_no_other(image: str, project: Project, limit: str) -> None:
    done = run_image(image, "run", limit, "--", "touch", "ran", project=project)
    assert done.returncode == 0, done.stderr
    assert (project.root / "ran").exists()


SPIN = """
import time
began = time.monotonic()
while time.process_time() < 1: pass
open("share", "w").write(str(time.process_time() / (time.monotonic() - began)))
"""


def test_a_share_of_the_processor_is_no_more_than_that(image: str, project: Project) -> None:
    done = run_image(image, "run", "--cpu-limit", "0.25", "--", "python3", "-c", SPIN, project=project)
    assert done.returncode == 0, done.stderr
    assert float((project.root / "share").read_text()) < 0.4


def test_limits_of_the_container_limit_its_branches(image: str, project: Project) -> None:
    before = project.tree()
    command = ["run", "--memory-limit", "1G", "--json", "--", *HOG]
    done = run_image(image, *command, project=project, mem_limit="120m", memswap_limit="120m")
    assert (done.returncode, project.tree()) == (137, before), done.stderr
    assert json.loads(done.stdout)["ended"] == "oom"


RAISE = """
mount -o remount,bind,rw /sys/fs/cgroup
for point in /sys/fs/cgroup/*/; do mount -o remount,bind,rw "$point"; done
files=$(find /sys/fs/cgroup -name memory.max -o -name memory.limit_in_bytes)
test -n "$files" || exit 3
for file in $files; do echo 1G >"$file" && exit 4; done
exec python3 -c 'held = bytearray(200 << 20)'
"""


@pytest.mark.parametrize("environment", [{}, {"BRANCHING_ROOT": "1"}], ids=["as the owner", "as root"])
def test_a_branch_cannot_raise_its_own_limit(image: str, project: Project, environment: dict[str, str]) -> None:
    """Nor that of the container: it sees their files, and may write none of them."""
    before = project.tree()
    command = ["run", "--memory-limit", "64M", "--json", "--", "sh", "-c", RAISE]
    done = run_image(image, *command, project=project, environment=environment)
    assert (done.returncode, project.tree()) == (137, before), done.stderr
    assert json.loads(done.stdout)["ended"] == "oom"


def test_the_containers_root_can_raise_the_containers_limit_under_version_1_alone(image: str, version: int) -> None:
    """What docs/limits.md says of who is more than a branch: with SYS_ADMIN, and outside all sandboxes."""
    place, file = {1: ("/memory", "memory.limit_in_bytes"), 2: ("", "memory.max")}[version]
    path = f"/sys/fs/cgroup{place}"
    script = f"mount -o remount,bind,rw {path} && echo {256 << 20} >{path}/{file}; cat {path}/{file}"
    done = run_image(image, "-c", script, entrypoint="sh", mem_limit="128m")
    assert int(done.stdout) >> 20 == (256 if version == 1 else 128), done.stderr


def test_memory_high_is_refused_by_version_1_and_kept_by_version_2(image: str, project: Project, version: int) -> None:
    before = project.tree()
    done = run_image(image, "run", "--memory-high", "400M", "--", "touch", "ran", project=project)
    if version == 1:
        assert (done.returncode, project.tree()) == (125, before)
        assert "the limit on memory_high cannot be enforced: this system has cgroup v1" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert (project.root / "ran").exists()


def test_without_root_a_limit_is_refused_and_nothing_runs(
    image: str, project: Project, make_device: Callable[[int], str]
) -> None:
    before = project.tree()
    command = ["run", "--memory-limit", "64M", "--", "touch", "ran"]
    options = [*PRIVILEGE, *UNMASKED]
    done = run_as_owner(image, *command, project=project, device=make_device(0o666), options=options)
    assert (done.returncode, project.tree()) == (125, before)
    assert "the limit on memory cannot be enforced" in done.stderr
    assert "Hint: run as root" in done.stderr


def test_commands_in_a_warm_container_have_their_own_limits(
    image: str, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 lets nothing run in a group with limits below it: who comes later is put beside them, too."""
    monkeypatch.setenv("BRANCHING_IMAGE", image)

    def wrapper(*words: str) -> int:
        command: list[str | Path] = [WRAPPER, "-w", project.root, *words]
        return subprocess.run(command, capture_output=True, timeout=RUN_SECONDS, env=os.environ).returncode

    assert wrapper("up") == 0
    try:
        hog = ["run", "--memory-limit", "64M", "--", *HOG]
        asked = [hog, ["exec", "--", "sh", "-c", "exit 3"], [*hog[:2], "1G", *hog[3:]], hog]
        assert [wrapper(*words) for words in asked] == [137, 3, 0, 137]
    finally:
        assert wrapper("down") == 0
