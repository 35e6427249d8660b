"""The published BranchFS: the crate `branchfs` 0.1.1, driven through its control files.

Not through its command line: that starts a program a step, which would be measured instead.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..field.contestant import Cannot, Contestant, children_named, run

VERSION = "0.1.1"
_CREATE, _COMMIT, _ABORT = 0x80806200, 0x6201, 0x6202


def program() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "branching-tools/peers/bin/branchfs"


class Published(Contestant):
    name = f"branchfs {VERSION}"

    def check(self) -> None:
        if not program().exists():
            root = program().parent.parent
            raise Cannot(
                f"not installed: cargo install --locked --version {VERSION} --root {root} branchfs"
            )

    def begin(self, base: Path, scratch: Path) -> None:
        super().begin(base, scratch)
        self.mounted = False
        self.root, self.store = scratch / "mount", scratch / "store"
        self.root.mkdir()
        self.store.mkdir()
        fast = ("--passthrough",) if os.geteuid() == 0 else ()
        run(program(), "mount", "--base", base, "--storage", self.store, *fast, self.root)
        self.mounted = True

    def end(self) -> None:
        if self.mounted:
            run(program(), "unmount", self.root, "--storage", self.store)

    def create(self, name: str, parent: str | None = None) -> str:
        answer = self._tell(self.root / (f"@{parent}" if parent else ""), _CREATE, bytes(128))
        return answer.rstrip(b"\0").decode()

    def path(self, branch: str) -> Path:
        return self.root / f"@{branch}"

    def commit(self, branch: str) -> None:
        self._tell(self.path(branch), _COMMIT)

    def abort(self, branch: str) -> None:
        self._tell(self.path(branch), _ABORT)

    def daemons(self) -> list[int]:
        return children_named(str(self.store))

    @staticmethod
    def _tell(directory: Path, request: int, buffer: bytes = b"") -> bytes:
        file = os.open(directory / ".branchfs_ctl", os.O_RDWR)
        try:
            if buffer:
                return fcntl.ioctl(file, request, buffer)
            fcntl.ioctl(file, request)
            return b""
        finally:
            os.close(file)
