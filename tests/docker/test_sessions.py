"""Sessions in the image: with the documented flags, both drivers, as the owner of the directory."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from project_snapshot import Project

pytestmark = pytest.mark.timeout(1200)

GENERATIONS = """
from branching import Session
with Session("/src") as session:
    session.run("import os; x = 0; log = open('log', 'a')").result()
    for turn in range(100):
        children = session.fork(2)
        for child in children:
            child.run("x += 1; log.write('.'); log.flush()").result()
        session.pick(children[1])
    session.commit()
    print(session.run("x, os.getuid(), os.getcwd()").value)
"""


@pytest.mark.parametrize(("driver", "capabilities"), [("fuse", []), ("overlay", ["DAC_READ_SEARCH"])])
def test_a_session_has_a_hundred_generations(
    image: str, project: Project, driver: str, capabilities: list[str]
) -> None:
    flags = [word for name in ("SYS_ADMIN", *capabilities) for word in ("--cap-add", name)]
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--device", "/dev/fuse", *flags, "--security-opt", "apparmor:unconfined"),
            *("-e", f"BRANCHFS_DRIVER={driver}", "-v", f"{project.root}:/src"),
            *("--entrypoint", "/opt/branching/bin/python", image, "-c", GENERATIONS),
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"(100, {project.owner}, '/src')\n"), done.stderr
    assert (project.root / "log").read_text() == "." * 100
    assert (project.root / "log").stat().st_uid == project.owner
