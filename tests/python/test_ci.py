"""The GitHub Action and the GitLab template: their scripts, as the services run them.

A stand-in for `docker` checks the flags and runs `branching` itself on the directory: tests/docker
runs the image with the same flags.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

TOP = Path(__file__).parents[2]
RACE = "speculate\n--json\n-c\nexit 3\n-c\necho 'a b' >won; echo I won >&2"
FLAGS = "--device /dev/fuse --cap-add SYS_ADMIN --security-opt apparmor:unconfined"
DOCKER = f"""#!/bin/sh
case "$*" in "run --rm "*"{FLAGS}"*" $PWD:/src the-image "*) ;; *) echo "$*" >&2; exit 99;; esac
case "$*" in *"--network none"*) ;; *) exit 98;; esac
while [ "$1" != the-image ]; do shift; done
shift
exec {sys.executable} -m branching "$@"
"""
Result = tuple[subprocess.CompletedProcess[str], str]


def bash(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a step as both services do."""
    programs = cwd.parent / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
        cwd=cwd,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def action(project: Path, arguments: str) -> Result:
    """Runs the step of the Action; returns it with its report."""
    step = yaml.safe_load((TOP / "action.yml").read_text())["runs"]["steps"][1]
    output, report = project.parent / "output", project.parent / "race.html"
    output.unlink(missing_ok=True)
    environment = {"GITHUB_OUTPUT": str(output), "REPORT": str(report), "NETWORK": "false"}
    done = bash(step["run"], project, ARGUMENTS=arguments, IMAGE="the-image", **environment)
    lines = output.read_text().splitlines()
    assert lines[0] == f"exit-code={done.returncode}"
    assert lines[1] == f"document<<{lines[-1]}"
    assert "\n".join(lines[2:-1]).strip() == done.stdout.strip()
    return done, report.read_text() if report.exists() else ""


def gitlab(project: Path, arguments: str) -> Result:
    """Runs the script of the template; returns it with its report."""
    job = yaml.safe_load((TOP / "ci" / "gitlab.yml").read_text())[".branching"]
    variables = {"BRANCHING_IMAGE": "the-image", "BRANCHING_ARGUMENTS": arguments}
    done = bash("\n".join(job["script"]), project, **{**job["variables"], **variables})
    document, report = (project / name for name in job["artifacts"]["paths"])
    assert document.read_text() == done.stdout
    return done, report.read_text() if report.exists() else ""


@pytest.mark.parametrize("service", [action, gitlab])
def test_a_job_commits_the_winner_writes_the_report_and_ends_as_the_call_does(
    service: Callable[[Path, str], Result], outside: Path
) -> None:
    project = outside / "beside" / "project"
    project.mkdir(parents=True)
    done, report = service(project, RACE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["winner"] == 1
    assert (project / "won").read_text() == "a b\n"
    assert "I won" in report
    done, report = service(project, "best-of-n\n-n\n2\n--\nfalse")
    assert done.returncode == 1
    assert "Nothing was committed" in report
    assert service(project, "no-such-command")[0].returncode == 2
