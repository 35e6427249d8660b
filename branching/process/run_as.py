"""The user that commands run as.

In a container all processes start as root. The user could not remove files that root creates in
their directory. So if this process is root and the workspace's owner is not, commands run as the
owner; otherwise as this process's user. The owner often has no entry in the container's password
file, and so no home directory. Programs would then use `/` and fail, so they get a temporary home.
`branching-docker --root` runs commands as root.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT_VARIABLE = "BRANCHING_ROOT"
"""With the value 1, commands run as root if this process is root."""


class Owner(NamedTuple):
    """The user and group that commands run as, and their home directory."""

    uid: int
    gid: int
    name: str
    home: Path

    @staticmethod
    @contextmanager
    def of(uid: int, gid: int) -> Iterator[Owner | None]:
        """Yields the owner to run commands as for files of uid:gid, None to keep our own user."""
        if os.geteuid() != 0 or uid == 0 or os.environ.get(ROOT_VARIABLE) == "1":
            yield None
            return
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            entry = None
        if entry is not None and _is_home_of(uid, Path(entry.pw_dir)):
            yield Owner(uid=uid, gid=gid, name=entry.pw_name, home=Path(entry.pw_dir))
            return
        import tempfile

        home = Path(tempfile.mkdtemp(prefix="branching-home-"))
        try:
            os.chown(home, uid, gid)
            yield Owner(uid=uid, gid=gid, name=entry.pw_name if entry else str(uid), home=home)
        finally:
            # What a dying process still writes there may make rmtree miss a file: nothing of
            # value, and there is no caller to report the error to.
            import shutil

            shutil.rmtree(home, ignore_errors=True)

    @staticmethod
    def home_of(owner: Owner | None) -> Path | None:
        """Returns the home directory of commands: the owner's, or that of this process's user."""
        if owner is not None:
            return owner.home
        ours = os.environ.get("HOME")
        return Path(ours) if ours else None

    def environment(self) -> Mapping[str, str]:
        """Returns the environment variables that name the user."""
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}


def _is_home_of(uid: int, home: Path) -> bool:
    try:
        return home.stat().st_uid == uid
    except OSError:
        return False
