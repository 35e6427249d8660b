"""The short way into a warm container, for a command line as plain as `-w DIR -e A=1 COMMAND ...`.

What configuration files set the container has, as long as they are those that it was made with.

It has to be: `docker exec` takes sixty milliseconds, and loading Typer alone as much again. What it does not understand
at first sight it leaves to the long way, which decides everything anew; so here is no refusal and no message.
"""

from __future__ import annotations

import os
import os.path as path

from branching_docker.names import (
    COMMAND_VARIABLE,
    DIRECTORY_LABEL,
    EXEC,
    JOURNAL,
    OURS,
    RECOVER,
    STAMP_LABEL,
    WARM_LABEL,
    WORKSPACE_LABEL,
    command_name,
)
from branching_docker.stamp import identity, stamp

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHORT = {"-w": "w", "--workspace": "w", "-e": "e", "--env": "e", "-u": "u", "--user": "u"}
NAMES_HOST_FILES = ("export", "load", "mcp")
"""A test compares them with `host_files`, which takes too long to load."""
CHANGES_A_COMMAND = ("BRANCHING_ENGINE", "BRANCHING_ROOT", "BRANCHING_USER")


def quick(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Runs the command in the workspace's warm container and returns its exit code; None: not decided here."""
    given: dict[str, list[str]] = {"w": [], "e": [], "u": []}
    while len(words) > 2 and (option := SHORT.get(words[0])):
        given[option].append(words[1])
        words = words[2:]
    if len(given["w"]) != 1 or not words or words[0].startswith("-") or "" in (*given["w"], *given["u"]):
        return None
    if (words[0] in OURS and words[0] != EXEC) or any(environ.get(name) for name in CHANGES_A_COMMAND):
        return None
    if words[0] in NAMES_HOST_FILES or (words[0] != EXEC and words[1:2] in (["-h"], ["--help"])):
        return None
    try:
        workspace = path.realpath(given["w"][0])
    except OSError:  # we stand in a directory that went away
        return None
    docker = find_program("docker", environ.get("PATH", ""))
    if docker is None or path.basename(path.realpath(docker)) != "docker":
        return None
    found = find_warm(workspace, environ)
    if found is None:
        return None
    from branching_docker.attach import GONE
    from branching_docker.entry import enter, inner_words

    inside = inner_words(words)
    if inside is None:
        return None
    options = [word for user in given["u"][-1:] for word in ("--user", user)]
    options += [word for assignment in given["e"] for word in ("--env", assignment)]
    if words[0] != EXEC:
        options += ["--env", f"{COMMAND_VARIABLE}={command_name(workspace)}"]
    code = enter(inside, docker=docker, container=found[0], environ=environ, options=options, at=found[1])
    if code == GONE:
        recover(workspace, environ)
    return code


def recover(workspace: str, environ: Mapping[str, str]) -> None:
    """Settles a commit that was going on when the container was killed, by the long way."""
    try:
        if not os.listdir(path.join(workspace, JOURNAL)):
            return
    except OSError:
        return  # there is no store, or we may not look into it: the next command recovers
    import sys  # what the rest has done without

    words = [sys.executable, "-m", "branching_docker", "-w", workspace, RECOVER]
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
    from branching_docker import api
    from branching_docker.endpoint import endpoint

    if not workspace.isprintable() or '"' in workspace or "\\" in workspace:
        return None  # JSON by hand, below
    files = stamp(workspace, environ)
    made_with = f',"{DIRECTORY_LABEL}={identity(workspace)}"'
    made_with += f',"{STAMP_LABEL}={files}"' if files else ""
    filters = f'{{"label":["{WARM_LABEL}","{WORKSPACE_LABEL}={workspace}"{made_with}],"status":["running"]}}'
    try:
        at = endpoint(environ)
        listed = api.request("GET", f"/containers/json?filters={api.quoted(filters)}", at=at)
    except Exception:  # whatever it is, the long way meets it again and says it
        return None
    # One container, and its id comes first: a parser would cost more than the question did.
    _, key, rest = listed.partition(b'[{"Id":"')
    return (rest[:64].decode(), at) if key and b'{"Id":"' not in rest else None
