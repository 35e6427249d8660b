"""Limits inside the image, with the documented flags alone: Docker shows the control groups read-only there."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree import Project

DOCUMENTED = [
    "--device",
    "/dev/fuse",
    "--cap-add",
    "SYS_ADMIN",
    "--security-opt",
    "apparmor:unconfined",
]
RUN_SECONDS = 120
HOG = ["python3", "-c", "held = bytearray(200 << 20); open('made', 'w').close()"]


def branching(image: str, project: Project, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `branching WORDS` in a container over the project."""
    return subprocess.run(
        ["docker", "run", "--rm", *DOCUMENTED, "-v", f"{project.root}:/src", image, *words],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )


def test_a_hog_is_killed_and_nothing_of_it_committed(image: str, project: Project) -> None:
    """Contract 3.15: 32 MiB allowed, 200 MiB taken; the published image lets it pass and commits."""
    before = project.tree()
    done = branching(image, project, "run", "--memory-limit", "32M", "--json", "--", *HOG)
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
    done = branching(image, project, "speculate", *limits, "--parallel", "1", "--json", *candidates)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [each["ended"] for each in told["results"]] == ["disk", "pids", "exit"]
    assert told["winner"] == 2
    assert (project.root / "won").exists()
