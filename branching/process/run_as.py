"""Whom a command runs as.

In a container everything starts as root, and a file made by root in the user's own directory is
a file the user cannot remove. So a command runs as the owner of the workspace whenever we are
root and the owner is not; in all other cases as ourselves. The owner often has no entry in the
container's password file and so no home: programs then find `/` and fail, thus a private home is
lent for as long as the commands run. Who asks for root (`branching-docker --root`) gets root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT_VARIABLE = "BRANCHING_ROOT"
"""With the value 1, commands stay root where we are root."""


@dataclass(frozen=True, kw_only=True)
class Owner:
    """An identity that commands take on, with a home of its own."""

    uid: int
    gid: int
    name: str
    home: Path

    @staticmethod
    @contextmanager
    def of(uid: int, gid: int) -> Iterator[Owner | None]:
        """Yields who commands shall run as for files of uid:gid, None for ourselves."""
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
        home = Path(tempfile.mkdtemp(prefix="branching-home-"))
        try:
            os.chown(home, uid, gid)
            yield Owner(uid=uid, gid=gid, name=entry.pw_name if entry else str(uid), home=home)
        finally:
            # What a dying process still writes there may make rmtree miss a file: nothing of
            # value is in it, and nobody could be told.
            shutil.rmtree(home, ignore_errors=True)

    @staticmethod
    def home_of(owner: Owner | None) -> Path | None:
        """Returns the home that commands will have: the owner's; without one, ours."""
        if owner is not None:
            return owner.home
        ours = os.environ.get("HOME")
        return Path(ours) if ours else None

    def environment(self) -> Mapping[str, str]:
        """Returns the variables that tell a program who it is."""
        return {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}


def _is_home_of(uid: int, home: Path) -> bool:
    try:
        return home.stat().st_uid == uid
    except OSError:
        return False
