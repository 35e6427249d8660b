"""Which directory it is, and which configuration files there are, told without reading them: the stamp of a workspace.

A warm container that has nothing but its files' settings carries their stamp, and has what they set. While the stamp is
the same, a command in it need not read them again: parsing takes as long as the command.
"""

from __future__ import annotations

import os

from branching_docker.names import SETTINGS_FILE

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Mapping

UNREADABLE = "-"


def stamp(workspace: str, environ: Mapping[str, str]) -> str:
    """Returns what tells the workspace's files from others and from what they were; empty if there are none."""
    configured = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    told = []
    for place in (workspace, configured):
        try:
            found = os.stat(os.path.join(place, SETTINGS_FILE))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # whoever reads it will say why
            return UNREADABLE
        told.append(f"{found.st_dev}.{found.st_ino}.{found.st_size}.{found.st_mtime_ns}.{found.st_ctime_ns}")
    return "+".join(told)


def identity(workspace: str) -> str:
    """Returns what tells a directory from another that has its name later; empty if it is not there.

    As long as a container has it mounted its number is not given to another.
    """
    try:
        found = os.stat(workspace)
    except OSError:
        return ""
    return f"{found.st_dev}.{found.st_ino}"
