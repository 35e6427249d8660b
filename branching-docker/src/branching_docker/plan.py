"""The plan of one container: the complete docker command, decided before anything runs.

Pure: settings in, a frozen `ContainerPlan` out, whose `argv()` is the exact command. Only the directory's path and
permissions are read, because a wrong one is refused here.

The options of a plan, and their reasons:
    --init                                      signals reach the command, and its exit code comes back, in any image;
                                                not with Podman, which needs a program for it: the image's own init does
    --device /dev/fuse, --cap-add SYS_ADMIN     BranchFS mounts inside the container; the mount needs both
    --cap-add DAC_READ_SEARCH                   without it the kernel's overlay silently breaks hard links; only the
                                                container's root has it, no command; not with the driver fuse
    --security-opt apparmor:unconfined          Docker's profile denies mount; does nothing where AppArmor is absent
    --security-opt label=disable                where the engine has SELinux, which hides the directory from containers;
                                                :z would relabel the user's whole tree
    --security-opt systempaths=unconfined       with --user alone (Podman: unmask=ALL): a sandbox without root is in
                                                a user namespace, where no /proc can be mounted if one is masked
    --mount type=bind                           not -v, which creates a missing directory as root instead of failing
    --rm, --name, --label                       the container is removed at its end, and can be found while it runs
    --sig-proxy=false                           Podman's warm container: its command can be two processes, and when
                                                the first is killed the second forwards SIGTERM to the container
    --interactive                               for pipes and terminals; without it docker silently drops input
    --tty                                       only between two terminals: docker refuses it on a pipe
    --mount type=volume                         the store, with --store or where the engine is in a virtual machine,
                                                on whose shared directories commits are not safe
A warm container has the same options and no command of its own: it waits for commands that `docker exec` starts.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from branching_docker.constants import (
    BASE_IN_CONTAINER,
    COMMAND_VARIABLE,
    DIRECTORY_LABEL,
    FINGERPRINT_LABEL,
    HOST_VARIABLE,
    PROBE_WORD,
    ROOT_VARIABLE,
    STORE_IN_CONTAINER,
    STORE_VARIABLE,
    WARM_LABEL,
    WARM_WORD,
    WORKSPACE_LABEL,
    command_name,
)
from branching_docker.engine_info import EngineInfo
from branching_docker.errors import WorkspaceError
from branching_docker.fingerprint import directory_identity
from branching_docker.git_links import repository
from branching_docker.settings import Settings, idle_seconds
from branching_docker.store_volume import digest, store_volume
from branching_docker.warm_exec import presentation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PASSED_TO_DOCKER = ("network", "user", "memory", "cpus", "pids_limit", "platform")
PER_COMMAND = ("env", "env_file", "user", "root", "name", "idle", "engine", "pull")
"""What each command in a warm container may set; the other settings are fixed at the container's start."""


@dataclass(frozen=True, kw_only=True)
class ContainerPlan:
    """One container of the image on one directory."""

    workspace: Path
    name: str
    arguments: tuple[str, ...]
    settings: Settings = field(default_factory=Settings)
    info: EngineInfo = field(default_factory=EngineInfo)
    tty: bool = False
    environment: tuple[str, ...] = ()
    is_warm: bool = False
    fingerprint: str = ""
    """Of a warm container that has all settings of the configuration files: their fingerprint."""
    repository: Path | None = None
    """Of a git worktree or submodule: its repository, which lies outside of the directory."""
    caches: tuple[str, ...] = ()
    """Directories to mount at their own paths."""

    @property
    def image(self) -> str:
        """The image's name."""
        return self.settings.image

    def argv(self) -> list[str]:
        """Returns the docker command, ready to run or to paste."""
        settings = self.settings
        command = [self.info.kind, "run", "--rm", *init(self.info)]
        if not self.is_warm:
            command.append("--interactive")
        elif self.info.kind == "podman":
            command.append("--sig-proxy=false")
        if self.tty:
            command.append("--tty")
        command += ["--name", self.name, "--label", f"{WORKSPACE_LABEL}={self.workspace}"]
        command += ["--label", f"{DIRECTORY_LABEL}={directory_identity(str(self.workspace))}"]
        if self.is_warm:
            command += ["--label", f"{WARM_LABEL}={settings_label(settings)}"]
        if self.fingerprint:
            command += ["--label", f"{FINGERPRINT_LABEL}={self.fingerprint}"]
        command += privileges(settings, self.info)
        command += ["--mount", bind(self.workspace, BASE_IN_CONTAINER)]
        if self.repository is not None:
            command += ["--mount", bind(self.repository, str(self.repository), "readonly")]
        for cache in self.caches:
            command += ["--mount", bind(Path(cache), cache)]
        command += ["--env", f"{HOST_VARIABLE}={self.workspace}"]
        if volume := store_volume(self.workspace, settings, self.info):
            # In the container every directory is /src, so the store's path tells the volume and the directory.
            place = f"{STORE_IN_CONTAINER}/{volume}"
            label = f"volume-label={WORKSPACE_LABEL}={self.workspace}"
            command += ["--mount", csv_line("type=volume", f"src={volume}", f"dst={place}", label)]
            command += ["--env", f"{STORE_VARIABLE}={place}/{digest(self.workspace)}"]
        for name in PASSED_TO_DOCKER:
            if value := getattr(settings, name):
                command += [f"--{name.replace('_', '-')}", value]
        for option in ("volume", "publish"):
            for value in getattr(settings, option):
                command += [f"--{option}", value]
        if settings.pull != "never":
            command += ["--pull", settings.pull]
        return [*command, *environment_options(settings, self.environment), self.image, *self.arguments]


def plan_run(
    arguments: Sequence[str],
    *,
    workspace: Path,
    name: str,
    environ: Mapping[str, str],
    settings: Settings | None = None,
    info: EngineInfo | None = None,
    tty: bool = False,
    variables: Sequence[str] = (),
    caches: Sequence[str] = (),
) -> ContainerPlan:
    """Plans the container that runs `branching` with these arguments on a checked directory.

    `variables` are further variables of its environment: a name alone has the value of `environ`.
    """
    settings = settings or Settings()
    checked_volumes(settings.volume)
    return ContainerPlan(
        workspace=workspace,
        name=settings.name or name,
        arguments=tuple(arguments),
        settings=settings,
        info=info or EngineInfo(),
        tty=tty,
        environment=(
            *driver_environment(settings),
            *root_environment(settings),
            *presentation(environ, tty=tty),
            f"{COMMAND_VARIABLE}={command_name(str(workspace))}",
            *variables,
        ),
        repository=repository(workspace),
        caches=tuple(caches),
    )


def plan_warm(
    *, workspace: Path, settings: Settings, info: EngineInfo | None = None, fingerprint: str = ""
) -> ContainerPlan:
    """Plans the warm container of a checked directory.

    Its name follows from the directory, so the engine refuses the second of two that are created at the same moment.
    """
    checked_volumes(settings.volume)
    return ContainerPlan(
        workspace=workspace,
        name=settings.name or f"branching-warm-{digest(workspace)}",
        arguments=(WARM_WORD, str(idle_seconds(settings.idle))),
        settings=settings,
        info=info or EngineInfo(),
        environment=driver_environment(settings),
        is_warm=True,
        fingerprint=fingerprint,
        repository=repository(workspace),
    )


def is_settled(settings: Settings) -> bool:
    """Returns whether these settings of commands can be fixed at a warm container's start.

    A file of variables cannot, nor a variable with the caller's value: they are read for each command.
    """
    return not settings.root and not settings.env_file and all("=" in assignment for assignment in settings.env)


def init(info: EngineInfo) -> list[str]:
    """Returns the option for a first process that forwards signals."""
    return [] if info.kind == "podman" else ["--init"]


def privileges(settings: Settings, info: EngineInfo) -> list[str]:
    """Returns the options that mounting in a container needs."""
    overlay = ["--cap-add", "DAC_READ_SEARCH"] if settings.driver != "fuse" else []
    security = ["apparmor:unconfined"]
    if info.has_selinux:
        security.append("label=disable")
    if settings.user and settings.user.partition(":")[0] not in ("0", "root"):
        security.append("unmask=ALL" if info.kind == "podman" else "systempaths=unconfined")
    lifted = [word for value in security for word in ("--security-opt", value)]
    return ["--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", *overlay, *lifted]


def probe_argv(settings: Settings, workspace: Path | None, *, docker: str, info: EngineInfo) -> list[str]:
    """Returns the command of a container that reports about itself, and about the directory if one is given."""
    place = ["--mount", bind(workspace, BASE_IN_CONTAINER)] if workspace else []
    return [docker, "run", "--rm", *init(info), *privileges(settings, info), *place, settings.image, PROBE_WORD]


def exec_options(settings: Settings, *variables: str) -> list[str]:
    """Returns docker exec's options for one command in a warm container, with further variables."""
    user = ["--user", settings.user] if settings.user else []
    return [*user, *environment_options(settings, [*root_environment(settings), *variables])]


def environment_options(settings: Settings, more: Sequence[str]) -> list[str]:
    """Returns the options that set variables: the user's, and then our own, which override them."""
    options = [word for path in settings.env_file for word in ("--env-file", path)]
    return options + [word for assignment in (*settings.env, *more) for word in ("--env", assignment)]


def driver_environment(settings: Settings) -> tuple[str, ...]:
    """Returns the variables with the options of the container's mount."""
    driver = () if settings.driver == "auto" else (f"BRANCHFS_DRIVER={settings.driver}",)
    return driver if settings.policy == Settings().policy else (*driver, f"BRANCHFS_POLICY={settings.policy}")


def root_environment(settings: Settings) -> tuple[str, ...]:
    """Returns the variables for a command that runs as root."""
    return (f"{ROOT_VARIABLE}=1",) if settings.root else ()


def settings_label(settings: Settings) -> str:
    """Returns the fixed settings of a warm container, as JSON for its label."""
    kept = {
        name: value
        for name, value in vars(settings).items()
        if name not in PER_COMMAND and value != getattr(Settings(), name)
    }
    return json.dumps(kept, sort_keys=True)


def refused_changes(label: str, given: Mapping[str, object]) -> list[str]:
    """Returns the flags that differ from the fixed settings of a warm container."""
    kept = vars(Settings()) | {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(label).items()
    }
    return [
        "--" + name.replace("_", "-")
        for name, value in given.items()
        if value is not None and name not in PER_COMMAND
        if kept.get(name) != (tuple(value) if isinstance(value, list) else value)
    ]


def checked_workspace(directory: Path) -> Path:
    """Returns the directory's real path, so that exactly the checked directory is mounted.

    Raises:
        WorkspaceError: the directory cannot be used.
    """
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
            hint=f"ask its owner, or look at it: ls -ld {shlex.quote(str(real))}",
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


def bind(source: Path, destination: str, *options: str) -> str:
    """Returns the value of `--mount` for a bind."""
    return csv_line("type=bind", f"src={source}", f"dst={destination}", *options)


def checked_volumes(volumes: Sequence[str]) -> None:
    """Checks directories and their places in the container.

    Raises:
        WorkspaceError: a directory is missing, which docker would create as root; or it has no place in the container,
            and docker would create an empty, unnamed volume.
    """
    for volume in volumes:
        source, colon, _ = volume.partition(":")
        if not colon:
            raise WorkspaceError(
                f"-v {volume}: the path in the container is missing.", hint=f"-v {shlex.quote(f'{volume}:{volume}')}"
            )
        if colon and source.startswith(("/", ".")) and not os.path.lexists(source):
            raise WorkspaceError(f"-v {volume}: {source} does not exist.", hint=f"mkdir -p {shlex.quote(source)}")


def csv_line(*fields: str) -> str:
    """Returns the fields as a line of CSV, the format of `--mount`: paths may have commas, quotes and line breaks."""
    line = io.StringIO()
    csv.writer(line).writerow(fields)
    return line.getvalue().removesuffix("\r\n")
