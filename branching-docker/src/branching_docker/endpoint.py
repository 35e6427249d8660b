"""Which engine the docker command would talk to, found as docker finds it but without starting it.

    DOCKER_HOST             an address; wins over every context but one named on the command line, which we never do
    DOCKER_CONTEXT          the name of a context
    config.json             "currentContext", in DOCKER_CONFIG or ~/.docker
    contexts/meta/HASH/     a context's own file; HASH is the SHA-256 of its name

An engine on another machine has no such directory to mount, and is refused.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # type checkers know this name; importing typing costs a quarter of a warm command's start
if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL_SCHEME = "unix://"
ADDRESS_DEFAULT = "unix:///var/run/docker.sock"


def endpoint(environ: Mapping[str, str]) -> str:
    """Returns the path of the engine's socket on this machine.

    Raises EngineError where the engine is elsewhere, or the context is not known.
    """
    name, address = "default", environ.get("DOCKER_HOST") or ADDRESS_DEFAULT
    if not environ.get("DOCKER_HOST"):
        directory = environ.get("DOCKER_CONFIG") or os.path.join(environ.get("HOME", ""), ".docker")
        name = environ.get("DOCKER_CONTEXT") or current_context(directory)
        if name != "default":
            address = context_address(directory, name)
    if not address.startswith(LOCAL_SCHEME):
        from branching_docker.errors import EngineError

        is_named = not environ.get("DOCKER_HOST")
        what = f'Docker context "{name}"' if is_named else "engine that DOCKER_HOST names"
        way = "docker context use default" if is_named else "unset DOCKER_HOST"
        raise EngineError(
            f"the {what} is on another machine ({address}), where the directory does not exist.",
            hint=f"{way}, or run branching-docker on that machine",
        )
    return address.removeprefix(LOCAL_SCHEME) or ADDRESS_DEFAULT.removeprefix(LOCAL_SCHEME)


def current_context(directory: str) -> str:
    """Returns the name that `docker context use` has set, or docker's own default."""
    found = read_json(os.path.join(directory, "config.json"), having="currentContext")
    return str(found.get("currentContext") or "default")


def context_address(directory: str, name: str) -> str:
    """Returns the address in a context's file."""
    import hashlib

    digest = hashlib.sha256(name.encode()).hexdigest()
    described = read_json(os.path.join(directory, "contexts", "meta", digest, "meta.json"))
    try:
        return str(described["Endpoints"]["docker"]["Host"])  # type: ignore[index]
    except (KeyError, TypeError) as error:
        from branching_docker.errors import EngineError

        raise EngineError(
            f'docker knows no context "{name}".', hint="docker context ls; docker context use default"
        ) from error


def read_json(path: str, *, having: str = "") -> dict[str, object]:
    """Reads one of docker's files; one that is not there, or not JSON, says nothing, as docker has it.

    One without the word `having` is not worth loading a parser for.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return {}
    if having.encode() not in content:
        return {}
    import json

    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
