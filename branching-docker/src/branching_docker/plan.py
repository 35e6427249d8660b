"""The plan of one container: what will be run, decided before anything is.

Pure: arguments and environment in, a frozen `ContainerPlan` out, whose `argv()` is the exact command. It reads the
directory's place and permissions, since a wrong one must be refused here, and nothing else.

What every plan holds, and why:
    --device /dev/fuse, --cap-add SYS_ADMIN     BranchFS mounts inside the container; the mount needs both
    --security-opt apparmor:unconfined          Docker's profile denies mount; does nothing where AppArmor is absent
    --mount type=bind                           not -v, which makes a missing directory, as root, instead of failing
    --rm, --name, --label                       the container goes when it ends, and can be found while it runs
    --interactive                               pipes and terminals alike; without it docker drops input in silence
    --tty                                       only between two terminals: docker refuses it on a pipe
No --init: the image's entry point begins with one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branching_docker.errors import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

IMAGE_DEFAULT = "branching"
IMAGE_VARIABLE = "BRANCHING_IMAGE"
WORKSPACE_LABEL = "branching.workspace"
BASE_IN_CONTAINER = "/src"
# How the output may look is the host terminal's affair; docker passes on none of these by itself.
PRESENTATION_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """One run of `branching` in a container, down to the last argument."""

    image: str
    workspace: Path
    name: str
    arguments: tuple[str, ...]
    tty: bool = False
    environment: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """Returns the docker command, ready to run or to paste."""
        command = ["docker", "run", "--rm", "--interactive"]
        if self.tty:
            command.append("--tty")
        command += ["--name", self.name, "--label", f"{WORKSPACE_LABEL}={self.workspace}"]
        command += [
            "--device",
            "/dev/fuse",
            "--cap-add",
            "SYS_ADMIN",
            "--security-opt",
            "apparmor:unconfined",
        ]
        command += ["--mount", bind(self.workspace, BASE_IN_CONTAINER)]
        for assignment in self.environment:
            command += ["--env", assignment]
        return [*command, self.image, *self.arguments]


def plan_run(
    arguments: Sequence[str],
    *,
    workspace: Path,
    name: str,
    environ: Mapping[str, str],
    image: str | None = None,
    tty: bool = False,
) -> ContainerPlan:
    """Decides on the container that runs `branching` with these arguments on the directory `workspace`.

    Raises WorkspaceError where the directory cannot be worked on.
    """
    return ContainerPlan(
        image=image or environ.get(IMAGE_VARIABLE) or IMAGE_DEFAULT,
        workspace=checked_workspace(workspace),
        name=name,
        arguments=tuple(arguments),
        tty=tty,
        environment=tuple(
            f"{variable}={environ[variable]}"
            for variable in PRESENTATION_VARIABLES
            if variable in environ and (tty or variable != "TERM")
        ),
    )


def checked_workspace(directory: Path) -> Path:
    """Returns the directory's real path: symbolic links resolved, so that what was checked is what will be mounted."""
    try:
        real = directory.resolve(strict=True)
        is_directory = real.is_dir()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise WorkspaceError(
            f"-w {directory} cannot be used.", cause=reason, hint="give an existing directory: -w ."
        ) from error
    if not is_directory:
        raise WorkspaceError(f"-w {directory} is not a directory.", hint="give the directory that holds it")
    if not os.access(real, os.R_OK | os.X_OK):
        raise WorkspaceError(
            f"-w {directory} is not readable by you.",
            hint=f"ask its owner, or look at it: ls -ld {real}",
        )
    try:
        str(real).encode()
    except UnicodeEncodeError as error:
        raise WorkspaceError(
            f"-w {directory!s:.200} has bytes in its path that are not UTF-8, which Docker cannot mount.".encode(
                errors="backslashreplace"
            ).decode(),
            hint="rename the directory, or name it through a bind mount",
        ) from error
    return real


def bind(source: Path, destination: str) -> str:
    """Returns the value of `--mount` for a bind.

    Docker reads it as one line of CSV, so a path with a comma, a quote or a line break is quoted as CSV quotes.
    """
    field = f"src={source}"
    if any(special in field for special in ',"\n\r'):
        field = '"' + field.replace('"', '""') + '"'
    return f"type=bind,{field},dst={destination}"
