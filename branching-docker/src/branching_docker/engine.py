"""The container engine: queries, life cycle of containers, build and pull.

Docker is asked through its SDK, and Podman, which has no daemon for the SDK to talk to, through its command. Attached
commands are not started here: `container_run` and `warm_exec` leave terminals, signals, job control and exit codes to
the engine's own command.

The SDK is imported when a Docker engine is first asked something.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from branching_docker.constants import DIRECTORY_LABEL, NAME_LABEL, STAGE_LABEL, WARM_LABEL, WORKSPACE_LABEL
from branching_docker.docker_context import find_socket
from branching_docker.engine_info import EngineInfo, docker_info, podman_info
from branching_docker.errors import EngineError, ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import docker

TIMEOUT_SECONDS = 120
"""For one request; a stop waits for the container besides."""
STOP_SECONDS = 60
"""How long a container may take to end its commands and unmount before it is killed."""
SELINUX = Path("/sys/fs/selinux/enforce")
CREATED_STATES = ("created", "configured", "initialized")
ENDED_STATES = ("exited", "stopped", "dead", "removing")


@dataclass(frozen=True, kw_only=True)
class WorkspaceContainer:
    """A container that works on a directory."""

    identifier: str
    name: str
    workspace: str
    state: str
    warm_settings: str | None
    """Of a warm container: the settings it was started with, as JSON."""
    directory: str = ""
    """Identifies the directory even if its path is given to another one later; empty if the label is missing."""
    created: float = 0.0
    """When it was created, by the clock of the engine's machine."""

    @property
    def is_created(self) -> bool:
        """Whether it was created and never started; an ordinary start takes a moment from one to the other."""
        return self.state in CREATED_STATES

    @property
    def has_ended(self) -> bool:
        """Whether no process runs in it any more, so that the engine is about to remove it."""
        return self.state in ENDED_STATES


class Engine(Protocol):
    """What we ask of an engine. All methods raise EngineError where it does not answer."""

    command: str
    """The path of its command."""
    socket_path: str | None
    """The path of its socket; None for an engine without a daemon."""

    def info(self) -> EngineInfo:
        """Returns what a plan must know about the engine."""

    def containers(self) -> list[WorkspaceContainer]:
        """Lists the containers of all directories, including those that have ended and are about to be removed."""

    def stop(self, container: str) -> None:
        """Stops a container; does nothing if it has ended by itself."""

    def remove(self, container: str) -> bool:
        """Removes a container unless it is running; returns whether this call removed it."""

    def is_known(self, container: str) -> bool:
        """Returns whether the engine still knows a container."""

    def image_labels(self, image: str) -> dict[str, str] | None:
        """Returns an image's labels, None where the engine has no such image."""

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        """Returns a volume's labels, None where the engine has no such volume."""

    def build(self, source: Path, image: str, arguments: Mapping[str, str]) -> None:
        """Builds an image from a directory with a Dockerfile, and shows the progress; raises ImageError."""

    def pull(self, image: str) -> None:
        """Pulls an image and shows the progress; raises ImageError."""

    def drop_superseded(self, image: str) -> None:
        """Removes the unnamed images that earlier builds of that name left, except the newest build stage, which is
        the builder's cache. Images built for another name stay.
        """


def connect(name: str | None, *, environ: Mapping[str, str]) -> Engine:
    """Returns the engine of that name; without a name Docker, or Podman where that is the only one.

    Raises:
        EngineError: it is not installed, or on another machine.
    """
    path = environ.get("PATH")
    for candidate in (name,) if name else ("docker", "podman"):
        if command := shutil.which(candidate, path=path):
            # Debian's podman-docker is a script called docker.
            is_podman = candidate == "podman" or os.path.basename(os.path.realpath(command)) == "podman"  # noqa: PTH119
            return Podman(command, environ) if is_podman else Docker(command, find_socket(environ))
    raise EngineError(
        f"the {name or 'docker'} command is not installed.",
        cause=f"there is no {name or 'docker'} on PATH",
        hint="install Docker (Debian, Ubuntu: sudo apt-get install docker.io; elsewhere: Docker Desktop)",
    )


class Docker:
    """Docker, asked through its SDK."""

    def __init__(self, command: str, socket_path: str) -> None:
        self.command = command
        self.socket_path: str | None = socket_path

    @cached_property
    def _client(self) -> docker.DockerClient:
        import docker

        try:
            return docker.DockerClient(base_url=f"unix://{self.socket_path}", timeout=TIMEOUT_SECONDS)
        # The SDK does not check the types of all values.
        except (AttributeError, TypeError, docker.errors.InvalidConfigFile) as error:
            raise EngineError(
                "Docker's configuration cannot be used.",
                cause=str(error),
                hint="correct config.json in ~/.docker, or in the directory that DOCKER_CONFIG names",
            ) from error

    @contextmanager
    def connected(self) -> Iterator[docker.DockerClient]:
        """Yields the SDK's client, and raises its failures as EngineError."""
        from docker.errors import APIError, DockerException
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        try:
            yield self._client
        except APIError as error:
            raise EngineError(
                "Docker refused a request.", cause=error.explanation, hint="docker info; branching-docker doctor"
            ) from error
        except (DockerException, RequestException, HTTPError) as error:
            raise unreachable(error, str(self.socket_path)) from error

    def ask(self, query: Callable[[docker.DockerClient], Any]) -> Any:
        """Returns the answer to a query, None where the engine does not know what it is about."""
        from docker.errors import NotFound

        with self.connected() as client, suppress(NotFound):
            return query(client)

    def info(self) -> EngineInfo:
        return docker_info(self.ask(lambda client: client.info()), platform=sys.platform)

    def containers(self) -> list[WorkspaceContainer]:
        # Not `containers.list`, which inspects each one: some are gone by then.
        return list_workspaces(
            self.ask(lambda client: client.api.containers(all=True, filters={"label": WORKSPACE_LABEL}))
        )

    def stop(self, container: str) -> None:
        self.ask(lambda client: client.api.stop(container, timeout=STOP_SECONDS))

    def remove(self, container: str) -> bool:
        with suppress(EngineError):  # it is running, or being removed
            return self.ask(lambda client: client.api.remove_container(container) or True) is True
        return False

    def is_known(self, container: str) -> bool:
        return self.ask(lambda client: client.api.inspect_container(container)) is not None

    def image_labels(self, image: str) -> dict[str, str] | None:
        return self.ask(lambda client: client.images.get(image).labels)  # type: ignore[no-any-return]

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        return self.ask(lambda client: client.volumes.get(volume).attrs["Labels"] or {})  # type: ignore[no-any-return]

    def build(self, source: Path, image: str, arguments: Mapping[str, str]) -> None:
        # By the engine's own builder, as the SDK has no BuildKit. By default the SDK keeps the container of each step.
        options = {"tag": image, "buildargs": dict(arguments), "rm": True, "forcerm": True}
        error = self.ask(lambda client: show_progress(client.api.build(path=str(source), decode=True, **options)))
        if error:
            raise not_built(image, error)

    def pull(self, image: str) -> None:
        from docker.errors import APIError

        with self.connected() as client:
            try:
                error = show_progress(client.api.pull(image, stream=True, decode=True))
            except APIError as refused:
                error = refused.explanation
        if error:
            raise not_pulled(image, error)

    def drop_superseded(self, image: str) -> None:
        from docker.errors import APIError

        with self.connected() as client:
            for stage, kept in (("image", 0), ("build", 1)):
                labels = [f"{STAGE_LABEL}={stage}", f"{NAME_LABEL}={image}"]
                unnamed = client.api.images(filters={"dangling": True, "label": labels})
                unnamed.sort(key=lambda one: one["Created"])
                for one in unnamed[: len(unnamed) - kept]:
                    with suppress(APIError):  # a container still runs from it; a later build finds it again
                        client.api.remove_image(one["Id"])


class Podman:
    """Podman, asked through its command."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self.command = command
        self.socket_path: str | None = None
        self.environ = environ
        if host := environ.get("CONTAINER_HOST"):
            raise EngineError(
                f"Podman is configured for another machine ({host}), where the directory does not exist.",
                hint="unset CONTAINER_HOST, or run branching-docker on that machine",
            )

    def info(self) -> EngineInfo:
        # `podman info` takes a tenth of a second.
        return podman_info(platform=sys.platform, has_selinux=SELINUX.exists())

    def containers(self) -> list[WorkspaceContainer]:
        listed = self.ask("ps", "--all", "--filter", f"label={WORKSPACE_LABEL}", "--format", "json")
        return list_workspaces(json.loads(listed.stdout or "[]"))

    def stop(self, container: str) -> None:
        self.ask("stop", "--ignore", "-t", str(STOP_SECONDS), container)

    def remove(self, container: str) -> bool:
        return self.run("rm", container).returncode == 0

    def is_known(self, container: str) -> bool:
        return self.run("container", "inspect", container).returncode == 0

    def image_labels(self, image: str) -> dict[str, str] | None:
        if self.ask("image", "exists", image, allowed=(0, 1)).returncode == 1:
            return None
        return json.loads(self.ask("image", "inspect", image).stdout)[0].get("Labels") or {}

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        found = self.ask("volume", "inspect", volume, allowed=(0, 1, 125))
        return None if found.returncode else json.loads(found.stdout)[0].get("Labels") or {}

    def build(self, source: Path, image: str, arguments: Mapping[str, str]) -> None:
        options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        command = [self.command, "build", "--tag", image, *options, str(source)]
        if code := subprocess.run(command, env=self.environ, check=False).returncode:
            raise not_built(image, f"podman build exited with {code}")

    def pull(self, image: str) -> None:
        if code := subprocess.run([self.command, "pull", image], env=self.environ, check=False).returncode:
            raise not_pulled(image, f"podman pull exited with {code}")

    def drop_superseded(self, image: str) -> None:
        """Does nothing: Podman's builder keeps stages as a cache of its own."""

    def ask(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Runs podman; raises EngineError for an exit code that is not allowed."""
        done = self.run(*arguments)
        if done.returncode not in allowed:
            raise EngineError(
                f"podman {arguments[0]} failed.",
                cause=done.stderr.strip() or None,
                hint="podman info shows its configuration",
            )
        return done

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs podman, whatever its exit code."""
        return subprocess.run([self.command, *arguments], capture_output=True, text=True, env=self.environ, check=False)


def list_workspaces(listed: Iterable[Mapping[str, Any]]) -> list[WorkspaceContainer]:
    """Returns containers from an engine's list; one without a name is just being removed."""
    return [
        WorkspaceContainer(
            identifier=one["Id"],
            name=one["Names"][0].lstrip("/"),
            workspace=one["Labels"][WORKSPACE_LABEL],
            state=one["State"],
            warm_settings=one["Labels"].get(WARM_LABEL),
            directory=one["Labels"].get(DIRECTORY_LABEL, ""),
            created=one["Created"],
        )
        for one in listed
        if one["Names"]
    ]


def show_progress(parts: Iterable[Mapping[str, Any]]) -> str | None:
    """Prints what a build or a pull reports, except the progress bars, and returns its error if it failed."""
    for part in parts:
        if "error" in part:
            return str(part["error"])
        text = part.get("stream", "")
        if "status" in part and not part.get("progressDetail"):
            text = ": ".join(str(part[key]) for key in ("id", "status") if key in part) + "\n"
        print(text, end="", flush=True)
    return None


def not_built(image: str, cause: str) -> ImageError:
    """Returns the failure of a build."""
    return ImageError(
        f'the image "{image}" was not built.',
        cause=cause,
        hint="nothing was replaced; remove the cause and build again",
    )


def not_pulled(image: str, cause: str) -> ImageError:
    """Returns the failure of a pull."""
    return ImageError(
        f'the image "{image}" could not be pulled.',
        cause=cause,
        hint="branching-docker build makes it here; --image names another",
    )


def unreachable(error: BaseException, socket_path: str) -> EngineError:
    """Returns the failure of an engine that does not answer, with the first error of the operating system in the
    chain of `error` as its cause.
    """
    reason = str(error)
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            reason = link.strerror
            if isinstance(link, PermissionError):
                return EngineError(
                    f"permission denied: Docker at unix://{socket_path}.",
                    cause=reason,
                    hint="sudo usermod -aG docker $USER, then log in again",
                )
        link = link.__cause__ or link.__context__
    return EngineError(
        f"Docker does not answer at unix://{socket_path}.",
        cause=reason,
        hint="start it: sudo systemctl start docker, or open Docker Desktop",
    )
