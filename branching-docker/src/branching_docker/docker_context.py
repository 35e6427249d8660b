"""The socket of the engine that the docker command would use.

    DOCKER_HOST             an address; overrides every context
    DOCKER_CONTEXT          the name of a context
    config.json             "currentContext", in DOCKER_CONFIG or ~/.docker
    contexts/meta/HASH/     a context's own file; HASH is the SHA-256 of its name

The SDK's `ContextAPI` is not used. A command in a warm container needs this too, and importing the SDK takes 125 ms.
Besides, it finds no context where there is no config.json, then looks in the current directory, and takes an unknown
context for the default one.

An engine on another machine has no such directory to mount, and is refused.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # type checkers know this name; importing typing costs a quarter of a warm command's start
if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL_SCHEME = "unix://"
ADDRESS_DEFAULT = "unix:///var/run/docker.sock"


def find_socket(environ: Mapping[str, str]) -> str:
    """Returns the path of the engine's socket.

    Raises:
        EngineError: the engine is on another machine, or the context is unknown.
    """
    host = environ.get("DOCKER_HOST")
    name, address = "default", host or ADDRESS_DEFAULT
    if not host:
        directory = environ.get("DOCKER_CONFIG") or os.path.join(environ.get("HOME", ""), ".docker")
        name = environ.get("DOCKER_CONTEXT") or current_context(directory)
        if name != "default":
            address = context_address(directory, name)
    if not address.startswith(LOCAL_SCHEME):
        from branching_docker.errors import EngineError

        what, way = f'Docker context "{name}"', "docker context use default"
        if host:
            what, way = "engine that DOCKER_HOST names", "unset DOCKER_HOST"
        raise EngineError(
            f"the {what} is on another machine ({address}), where the directory does not exist.",
            hint=f"{way}, or run branching-docker on that machine",
        )
    return address.removeprefix(LOCAL_SCHEME) or ADDRESS_DEFAULT.removeprefix(LOCAL_SCHEME)


def current_context(directory: str) -> str:
    """Returns the name that `docker context use` has set, or docker's default."""
    config = read_json(os.path.join(directory, "config.json"), containing=b"currentContext")
    return str(config.get("currentContext") or "default")


def context_address(directory: str, name: str) -> str:
    """Returns the address in a context's file."""
    import hashlib

    digest = hashlib.sha256(name.encode()).hexdigest()
    context = read_json(os.path.join(directory, "contexts", "meta", digest, "meta.json"))
    try:
        return str(context["Endpoints"]["docker"]["Host"])  # type: ignore[index]
    except (KeyError, TypeError) as error:
        from branching_docker.errors import EngineError

        raise EngineError(
            f'there is no Docker context "{name}".', hint="docker context ls; docker context use default"
        ) from error


def read_json(path: str, *, containing: bytes = b"") -> dict[str, object]:
    """Returns a file of docker's; empty if it is missing or not JSON, which docker ignores too.

    A file without `containing` is not parsed, because importing the parser takes longer than reading the file.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
        if containing not in content:
            return {}
        import json

        config = json.loads(content)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
