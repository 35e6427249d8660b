"""The short way into a warm container, for a command line as plain as `-w DIR COMMAND ...` where nothing is configured.

It has to be: `docker exec` takes sixty milliseconds, and loading Typer alone as much again. What it does not understand
at first sight it leaves to the long way, which decides everything anew; so here is no refusal and no message.
"""

from __future__ import annotations

import os
import os.path as path

from branching_docker.names import EXEC, OURS, SETTINGS_FILE, WARM_LABEL, WORKSPACE_LABEL

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHANGES_A_COMMAND = ("BRANCHING_ENGINE", "BRANCHING_ROOT", "BRANCHING_USER")


def quick(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Runs the command in the workspace's warm container and returns its exit code; None: not decided here."""
    if len(words) < 3 or words[0] not in ("-w", "--workspace") or words[2].startswith("-"):
        return None
    if (words[2] in OURS and words[2] != EXEC) or any(environ.get(name) for name in CHANGES_A_COMMAND):
        return None
    workspace = path.realpath(words[1])
    configured = environ.get("XDG_CONFIG_HOME") or path.join(environ.get("HOME", ""), ".config")
    if any(path.exists(path.join(place, SETTINGS_FILE)) for place in (workspace, configured)):
        return None
    docker = find_program("docker", environ.get("PATH", ""))
    if docker is None or path.basename(path.realpath(docker)) != "docker":
        return None
    container = find_warm(workspace, environ)
    if container is None:
        return None
    from branching_docker.entry import enter, inner_words

    inside = inner_words(words[2:])
    return None if inside is None else enter(inside, docker=docker, container=container, environ=environ)


def find_program(name: str, search: str) -> str | None:
    """Returns the path of a program."""
    for place in search.split(":"):
        candidate = path.join(place, name)
        if os.access(candidate, os.X_OK) and path.isfile(candidate):
            return candidate
    return None


def find_warm(workspace: str, environ: Mapping[str, str]) -> str | None:
    """Returns the id of the workspace's warm container."""
    from branching_docker import api
    from branching_docker.endpoint import endpoint

    if not workspace.isprintable() or '"' in workspace or "\\" in workspace:
        return None  # JSON by hand, below
    filters = f'{{"label":["{WARM_LABEL}","{WORKSPACE_LABEL}={workspace}"],"status":["running"]}}'
    try:
        listed = api.request("GET", f"/containers/json?filters={api.quoted(filters)}", at=endpoint(environ))
    except Exception:  # whatever it is, the long way meets it again and says it
        return None
    # One container, and its id comes first: a parser would cost more than the question did.
    _, key, rest = listed.partition(b'[{"Id":"')
    return rest[:64].decode() if key and b'{"Id":"' not in rest else None
