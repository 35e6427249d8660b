"""The fast path into a warm container, for a plain command line such as `-w DIR -e A=1 COMMAND ...`.

Importing Typer takes 45 ms and the Docker SDK 125 ms; a whole `exec -- true` on this path takes 70 ms. What this path
does not handle it leaves to `cli`, which decides everything again. So it reports no errors.

Settings of configuration files need not be read: the container has them, as long as the files are those that it was
started with.
"""

from __future__ import annotations

import os
import os.path as path

from branching_docker.constants import (
    COMMAND_VARIABLE,
    DIRECTORY_LABEL,
    EXEC,
    FINGERPRINT_LABEL,
    JOURNAL,
    OWN_COMMANDS,
    RECOVER,
    WARM_LABEL,
    WORKSPACE_LABEL,
    command_name,
    inner_settings_path,
)
from branching_docker.fingerprint import config_fingerprint, directory_identity

TYPE_CHECKING = False  # see docker_context
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHORT = {"-w": "w", "--workspace": "w", "-e": "e", "--env": "e", "-u": "u", "--user": "u"}
NAMES_HOST_FILES = ("export", "load", "mcp")
"""A test compares them with `host_files`, which takes too long to load."""
HOST_FILE_OPTIONS = ("--report", "--cache")
"""Of any command: options that name a file or directory of the host."""
CHANGES_A_COMMAND = ("BRANCHING_ENGINE", "BRANCHING_ROOT", "BRANCHING_USER")


def try_fast_path(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Runs the command in the workspace's warm container and returns its exit code; None leaves it to `cli`."""
    given: dict[str, list[str]] = {"w": [], "e": [], "u": []}
    while len(words) > 2 and (option := SHORT.get(words[0])):
        given[option].append(words[1])
        words = words[2:]
    if len(given["w"]) > 1 or not words or words[0].startswith("-") or "" in (*given["w"], *given["u"]):
        return None
    if (words[0] in OWN_COMMANDS and words[0] != EXEC) or any(environ.get(name) for name in CHANGES_A_COMMAND):
        return None
    if words[0] == "ls" and not given["w"]:
        return None  # it lists the containers, too
    if words[0] in NAMES_HOST_FILES or (words[0] != EXEC and words[1:2] in (["-h"], ["--help"])):
        return None
    if path.exists(inner_settings_path(environ)):
        return None
    if any(word.partition("=")[0] in HOST_FILE_OPTIONS for word in words):
        return None
    try:
        workspace = path.realpath("".join(given["w"]) or ".")
    except OSError:  # we stand in a directory that went away
        return None
    docker = find_program("docker", environ.get("PATH", ""))
    if docker is None or path.basename(path.realpath(docker)) != "docker":
        return None
    found = find_warm(workspace, environ)
    if found is None:
        return None
    from branching_docker.engine_api import CONTAINER_KILLED
    from branching_docker.warm_exec import container_words, run_in_container

    inside = container_words(words)
    if inside is None:
        return None
    options = [word for user in given["u"][-1:] for word in ("--user", user)]
    options += [word for assignment in given["e"] for word in ("--env", assignment)]
    if words[0] != EXEC:
        options += ["--env", f"{COMMAND_VARIABLE}={command_name(workspace)}"]
    code = run_in_container(inside, docker=docker, container=found[0], environ=environ, options=options, at=found[1])
    if code == CONTAINER_KILLED:
        recover(workspace, environ)
    return code


def recover(workspace: str, environ: Mapping[str, str]) -> None:
    """Settles a commit that was interrupted when the container was killed, by the `recover` command."""
    try:
        if not os.listdir(path.join(workspace, JOURNAL)):
            return
    except OSError:
        return  # there is no store, or we may not look into it: the next command recovers
    import sys

    # Not by `-m`, which would import modules from the current directory: it may be a stranger's.
    words = [sys.executable, sys.argv[0], "-w", workspace, RECOVER]
    os.waitpid(os.posix_spawn(sys.executable, words, environ), 0)


def find_program(name: str, search: str) -> str | None:
    """Returns the path of a program."""
    for place in search.split(":"):
        candidate = path.join(place, name)
        if os.access(candidate, os.X_OK) and path.isfile(candidate):
            return candidate
    return None


def find_warm(workspace: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the id of the workspace's warm container, and the engine's socket."""
    from branching_docker.docker_context import find_socket
    from branching_docker.engine_api import list_containers

    if not workspace.isprintable() or '"' in workspace or "\\" in workspace:
        return None  # JSON by hand, below
    files = config_fingerprint(workspace, environ)
    made_with = f',"{DIRECTORY_LABEL}={directory_identity(workspace)}"'
    made_with += f',"{FINGERPRINT_LABEL}={files}"' if files else ""
    filters = f'{{"label":["{WARM_LABEL}","{WORKSPACE_LABEL}={workspace}"{made_with}],"status":["running"]}}'
    try:
        at = find_socket(environ)
        listed = list_containers(filters, at=at)
    except Exception:  # whatever it is, `cli` meets it again and reports it
        return None
    # Exactly one container, whose id comes first: importing a JSON parser takes longer than the request.
    _, key, rest = listed.partition(b'[{"Id":"')
    return (rest[:64].decode(), at) if key and b'{"Id":"' not in rest else None
