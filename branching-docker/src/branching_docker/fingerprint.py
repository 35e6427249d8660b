"""Fingerprints of a workspace's configuration files and of its directory, taken without reading the files.

A warm container that has nothing but its files' settings is labelled with their fingerprint. While that stays the same,
a command in the container need not parse the files again, which takes as long as the command.
"""

from __future__ import annotations

import os

from branching_docker.constants import SETTINGS_FILE

TYPE_CHECKING = False  # see docker_context
if TYPE_CHECKING:
    from collections.abc import Mapping

UNREADABLE = "-"


def config_fingerprint(workspace: str, environ: Mapping[str, str]) -> str:
    """Returns a text that changes with the workspace's configuration files; empty if there are none."""
    user_directory = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    parts = []
    for directory in (workspace, user_directory):
        try:
            status = os.stat(os.path.join(directory, SETTINGS_FILE))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # reading the file will report the reason
            return UNREADABLE
        parts.append(f"{status.st_dev}.{status.st_ino}.{status.st_size}.{status.st_mtime_ns}.{status.st_ctime_ns}")
    return "+".join(parts)


def directory_identity(workspace: str) -> str:
    """Returns a text that identifies a directory even if its path is given to another later; empty if it is missing.

    The inode number is not reused while a container has the directory mounted.
    """
    try:
        status = os.stat(workspace)
    except OSError:
        return ""
    return f"{status.st_dev}.{status.st_ino}"
