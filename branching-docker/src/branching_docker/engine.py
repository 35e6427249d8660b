"""The only module that talks to Docker.

Queries go through the SDK. An attached run is handed to the docker command: this process *becomes* it, so that
terminals, signals, job control, contexts and exit codes are docker's own and nothing has to imitate them.

What docker does not do: when its command is killed outright, the container lives on. A watcher, a shell waiting on a
pipe whose other end the docker command holds without knowing, sees the pipe close whatever closed it, and stops the
container. After an ordinary end there is nothing left to stop.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing, suppress
from typing import TYPE_CHECKING, NoReturn

from branching_docker.errors import EngineError, ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from branching_docker.plan import ContainerPlan

QUERY_TIMEOUT_SECONDS = 10
REMOVAL_TIMEOUT_SECONDS = 120
STAGE_LABEL = "branching.stage"
# One stop for a running container (its entry point ends the command and unmounts), one removal for a created one.
WATCHER = 'read -r _; docker stop --time 10 "$0"; docker rm --force "$0"'
LOCAL_SCHEMES = ("unix://", "npipe://")


def run(plan: ContainerPlan, *, environ: Mapping[str, str]) -> NoReturn:
    """Becomes the plan's docker command, after checking that it can work.

    Raises EngineError or ImageError, with nothing started.
    """
    docker = docker_command(environ)
    require_image(plan.image, endpoint=local_endpoint(docker, environ))
    watch(plan.name, environ=environ)
    os.execve(docker, plan.argv(), environ)


def build(source: Path, image: str, *, environ: Mapping[str, str]) -> None:
    """Builds the image from a source tree, on the base that the tree's own script finds or makes.

    Raises EngineError or ImageError; an image of that name that was there before stays.
    """
    docker = docker_command(environ)
    endpoint = local_endpoint(docker, environ)
    if not (source / "Dockerfile").is_file():
        raise ImageError(
            f"{source} holds no Dockerfile.",
            hint="give the source tree: branching-docker build DIR",
        )
    base = subprocess.run(
        [source / "scripts" / "base-image"],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        check=False,
    )
    if base.returncode != 0:
        raise ImageError(
            "there is no base image to build on (its reason is above).",
            hint="follow the hint above",
        )
    command = [
        docker,
        "build",
        "--tag",
        image,
        "--build-arg",
        f"BASE_IMAGE={base.stdout.strip()}",
        str(source),
    ]
    if (code := subprocess.run(command, env=environ, check=False).returncode) != 0:
        raise ImageError(
            f'the image "{image}" was not built: docker build ended with {code} (its reason is above).',
            hint="nothing was replaced; mend the reason and build again",
        )
    drop_superseded(endpoint)


def drop_superseded(endpoint: str) -> None:
    """Removes what earlier builds left without a name, but for the newest build stage: the classic builder's cache."""
    import docker
    from docker.errors import APIError

    with closing(docker.DockerClient(base_url=endpoint, version="auto", timeout=REMOVAL_TIMEOUT_SECONDS)) as client:
        for stage, kept in (("image", 0), ("build", 1)):
            unnamed = {"dangling": True, "label": f"{STAGE_LABEL}={stage}"}
            found = sorted(client.images.list(filters=unnamed), key=lambda image: str(image.attrs["Created"]))
            for image in found[: len(found) - kept]:
                with suppress(APIError):  # a container still runs from it; a later build finds it again
                    client.images.remove(image.id)


def docker_command(environ: Mapping[str, str]) -> str:
    """Returns the path of the docker command."""
    docker = shutil.which("docker", path=environ.get("PATH"))
    if docker is None:
        raise EngineError(
            "the docker command is not installed.",
            cause="there is no docker on PATH",
            hint="install Docker (Debian, Ubuntu: sudo apt-get install docker.io; elsewhere: Docker Desktop)",
        )
    return docker


def local_endpoint(docker: str, environ: Mapping[str, str]) -> str:
    """Returns the address of the engine that the docker command will use: it alone knows all the ways to choose one.

    Raises EngineError where that engine is on another machine, which has no such directory to mount.
    """
    asked = subprocess.run(
        [docker, "context", "inspect", "--format", "{{.Name}} {{.Endpoints.docker.Host}}"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    name, _, endpoint = asked.stdout.strip().partition(" ")
    if asked.returncode != 0 or not endpoint:
        raise EngineError(
            "docker does not know which engine to use.",
            cause=asked.stderr.strip() or None,
            hint="docker context ls; docker context use default",
        )
    if not endpoint.startswith(LOCAL_SCHEMES):
        raise EngineError(
            f'the Docker context "{name}" is on another machine ({endpoint}), where the directory does not exist.',
            hint="DOCKER_HOST= docker context use default, or run branching-docker on that machine",
        )
    return endpoint


def require_image(image: str, *, endpoint: str) -> None:
    """Returns if the engine answers and has the image."""
    import docker
    from docker.errors import APIError, DockerException, ImageNotFound

    try:
        with closing(docker.DockerClient(base_url=endpoint, version="auto", timeout=QUERY_TIMEOUT_SECONDS)) as client:
            client.images.get(image)
    except ImageNotFound as error:
        raise ImageError(
            f'the image "{image}" is not on this machine.',
            hint=f"branching-docker build SOURCE_TREE, or docker pull {image}, or name another by BRANCHING_IMAGE",
        ) from error
    except APIError as error:
        raise EngineError(
            f'Docker could not look up the image "{image}".',
            cause=error.explanation or str(error),
            hint="docker image ls shows the names there are",
        ) from error
    except DockerException as error:
        raise unreachable(error, endpoint) from error


def unreachable(error: BaseException, endpoint: str) -> EngineError:
    """Returns what to tell a user whose engine did not answer."""
    reason = operating_system_reason(error)
    if isinstance(reason, PermissionError):
        return EngineError(
            f"you may not talk to Docker at {endpoint}.",
            cause=reason.strerror,
            hint="sudo usermod -aG docker $USER, then log in again",
        )
    return EngineError(
        f"Docker does not answer at {endpoint}.",
        cause=reason.strerror if reason and reason.strerror else str(error),
        hint="start it: sudo systemctl start docker, or open Docker Desktop",
    )


def operating_system_reason(error: BaseException) -> OSError | None:
    """Finds the error of the operating system that the HTTP layers above it have wrapped, some as mere arguments."""
    pending: list[object] = [error]
    seen: set[int] = set()
    while pending:
        candidate = pending.pop()
        if not isinstance(candidate, BaseException) or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        # The HTTP libraries' own errors are OSErrors too, but without a number.
        if isinstance(candidate, OSError) and isinstance(candidate.errno, int):
            return candidate
        pending += [candidate.__cause__, candidate.__context__, *candidate.args]
    return None


def watch(name: str, *, environ: Mapping[str, str]) -> None:
    """Starts the watcher of the container `name`, and leaves its pipe open in this process for what it will become."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    # A session of its own: what kills this process's group or closes its terminal must not reach it.
    subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, name],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=environ,
    )
    os.close(reading)
