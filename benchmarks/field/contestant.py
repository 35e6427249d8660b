"""What a way to branch a directory must do to take part, and how it says that it cannot."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

END_SECONDS_MAX = 10
"""A daemon without a mount ends by itself; what is there after this long is killed."""


class Cannot(Exception):
    """The contestant has no way to do this, or not here; the message says why, for the report."""


class Contestant:
    """A way to branch. One `begin` and one `end` surround its part in one workload of one run.

    Directories are the race's: `base` is what to branch from, `scratch` an empty directory on the
    same file system, for mounts and deltas. What it cannot do it leaves as it is here.
    """

    name = ""
    copies = False
    """A branch is a full copy: work in it is native's, only creating and dropping it differ."""

    base: Path
    scratch: Path

    def check(self) -> None:
        """Raises Cannot where this machine lacks what the contestant needs."""

    def begin(self, base: Path, scratch: Path) -> None:
        self.base, self.scratch = base, scratch

    def end(self) -> None:
        """Takes everything away that it made; also after a failure half-way."""

    def create(self, name: str, parent: str | None = None) -> str:
        """Creates a branch, of the base or of `parent`; returns the name it is known by."""
        raise Cannot("it has no branches")

    def path(self, branch: str) -> Path:
        """Returns the branch's directory."""
        raise NotImplementedError

    def commit(self, branch: str) -> None:
        raise Cannot("it has no commit: merging the delta is left to the caller")

    def abort(self, branch: str) -> None:
        raise NotImplementedError

    def daemons(self) -> list[int]:
        """Returns the processes that serve its branches."""
        raise Cannot("no process serves it")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command and returns what it printed; raises Cannot with its last line of complaint."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise Cannot(f"{Path(command[0]).name} failed: {said}")
    return done.stdout


def need(program: str, package: str) -> str:
    """Returns the path of a program; raises Cannot with the package that brings it."""
    if found := shutil.which(program):
        return found
    raise Cannot(f"{program} is not installed (Debian: {package})")


def children_named(word: str) -> list[int]:
    """Returns the processes one of whose arguments contains `word`: a directory of this race's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended meanwhile
            if any(word.encode() in argument for argument in arguments[1:]):
                found.append(int(entry.name))
    return found


def await_end(word: str) -> None:
    """Returns when no process has `word` in an argument any more: an end that is late is forced."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while left := children_named(word):
        if time.monotonic() > deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # at last
        time.sleep(0.01)
