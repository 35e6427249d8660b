"""Recovery of a directory whose container was killed in the middle of a commit.

A commit is applied file by file. A container that is killed meanwhile (docker kill, out of memory, a restart of the
engine) leaves old and new files, and an entry in the directory's journal. A short-lived container that mounts nothing
then finishes the commit or rolls it back. It is started by the first of these:

    in a container of its own   the watcher of the container (`container_run`), after its client has ended
    in a warm container         the command that ran in it, if its exit code means that the container was killed
    otherwise                   the next command on the directory, when it mounts; or `... recover`
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

from branching_docker.constants import JOURNAL, RECOVER_WORD
from branching_docker.errors import EngineError
from branching_docker.plan import ContainerPlan, plan_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from branching_docker.engine_info import EngineInfo
    from branching_docker.settings import Settings


NOTHING = "nothing to recover"
"""What the image prints if another process has recovered the directory already."""


def is_interrupted(workspace: Path) -> bool:
    """Returns whether the directory's journal has an entry. False if this user may not read the store."""
    try:
        with os.scandir(workspace / JOURNAL) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def plan_recovery(workspace: Path, *, settings: Settings, info: EngineInfo) -> ContainerPlan:
    """Plans the container that recovers, without the settings that only a command needs."""
    settings = replace(settings, name=None, publish=(), volume=(), env=(), env_file=(), network="none")
    name = f"branching-recovery-{os.urandom(4).hex()}"
    return plan_run([RECOVER_WORD], workspace=workspace, name=name, environ={}, settings=settings, info=info)


def recover(plan: ContainerPlan, *, docker: str, environ: Mapping[str, str]) -> str:
    """Runs the container to its end and returns its report as one line.

    Raises:
        EngineError: the recovery failed; the directory is unchanged.
    """
    done = subprocess.run(
        plan.argv(),
        executable=docker,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    if done.returncode != 0:
        raise EngineError(
            f"{plan.workspace} was not recovered: it may hold old and new files of an interrupted commit.",
            cause=done.stderr.strip() or None,
            hint="remove the cause, then run: branching-docker -w DIR recover",
        )
    return "; ".join(done.stdout.split("\n")[:-1])
