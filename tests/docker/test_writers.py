"""Commits in a container beside programs that write all the time, and beside many siblings."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from project_snapshot import Project

SECONDS_MAX = 600
COMMITS = 6
PRIVILEGES = ("--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor:unconfined")
OVERLAY = ("--cap-add", "DAC_READ_SEARCH")

BESIDE_A_WRITER = f"""
set -eu
mkdir /tmp/mounted
branchfs mount --driver "$1" --base /src /tmp/mounted
for round in $(seq {COMMITS}); do
    branch=$(branchfs create work /tmp/mounted)
    awk -v at="$branch" '$2 == at {{ print $3 }}' /proc/mounts
    while :; do echo $round >"$branch/written" || sleep 0.01; done 2>/dev/null & writer=$!
    until [ -s "$branch/written" ]; do sleep 0.01; done
    branchfs commit work /tmp/mounted >&2
    kill $writer
    wait $writer || :
    grep -qx $round /src/written
done
branchfs unmount /tmp/mounted
echo "all were committed"
"""

BESIDE_SIBLINGS = """
set -eu
mkdir /tmp/mounted
branchfs mount --driver fuse --policy snapshot --base /src /tmp/mounted
for number in $(seq 200); do
    echo $number >"$(branchfs create s$number /tmp/mounted)/new-$number"
done
start=$(date +%s%N)
for number in $(seq 50); do branchfs commit s$number /tmp/mounted >&2; done
echo $(( ($(date +%s%N) - start) / 1000000 ))
ls /tmp/mounted/@s200 | grep -c '^new-'
for number in $(seq 51 200); do branchfs abort s$number /tmp/mounted; done
until [ -z "$(ls /src/.branching/trash)" ]; do sleep 0.1; done
branchfs unmount /tmp/mounted
"""


def in_container(image: str, project: Project, options: tuple[str, ...], script: str, *words: str) -> list[str]:
    """Runs a script in a container, successfully. Returns the lines that it prints."""
    place = ("-u", "0", "-v", f"{project.root}:/src", "--entrypoint", "bash")
    command = ["docker", "run", "--rm", *options, *place, image, "-c", script, "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("driver", ["overlay", "fuse"])
def test_commits_succeed_beside_a_program_that_opens_and_closes_a_file_all_the_time(
    image: str, project: Project, driver: str
) -> None:
    options = (*PRIVILEGES, *OVERLAY) if driver == "overlay" else PRIVILEGES
    said = in_container(image, project, options, BESIDE_A_WRITER, driver)
    mounts = ["overlay"] * COMMITS if driver == "overlay" else []
    assert said == [*mounts, "all were committed"]


def test_commits_beside_many_siblings_are_fast_and_leave_their_snapshots(image: str, project: Project) -> None:
    """Once 50 of them took half a minute. With the start of a program for each they take a few seconds."""
    milliseconds, seen = in_container(image, project, PRIVILEGES, BESIDE_SIBLINGS)
    assert int(milliseconds) < 25_000
    assert seen == "1", "a sibling sees its own file alone"
