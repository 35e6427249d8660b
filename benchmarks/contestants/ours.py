"""Ours, with one driver or the other, over the control socket: as the Python library does it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from branching.fs.control_client import ControlSocket, RequestRefused

from ..field.contestant import Cannot, Contestant, run


def program() -> Path:
    """Returns $BRANCHFS, or the release build in this tree, or what is on PATH."""
    if named := os.environ.get("BRANCHFS"):
        return Path(named)
    built = Path(__file__).parents[2] / "branchfs/target/release/branchfs"
    if built.exists():
        return built
    return Path(shutil.which("branchfs") or built)


class Ours(Contestant):
    def __init__(self, driver: str) -> None:
        self.driver = driver
        self.name = f"ours, {driver}"

    def check(self) -> None:
        if not program().exists():
            raise Cannot("branchfs is not built: cd branchfs && cargo build --release --locked")

    def begin(self, base: Path, scratch: Path) -> None:
        super().begin(base, scratch)
        self.socket: ControlSocket | None = None
        self.root = scratch / "mount"
        self.root.mkdir()
        run(program(), "mount", "--driver", self.driver, "--base", base, self.root)
        self.socket = ControlSocket(os.getxattr(self.root, "user.branchfs.control").decode())
        self._request("info")  # as the library does when it opens a workspace

    def end(self) -> None:
        if self.socket:
            listed = self.socket.request("list", {})["branches"]
            assert isinstance(listed, list)
            for branch in listed:
                if branch["parent"] == 0:
                    self.abort(branch["name"])
            self.socket.close()
            run(program(), "unmount", self.root)

    def create(self, name: str, parent: str | None = None) -> str:
        self._request("create", name=name, parent=parent or "main")
        return name

    def path(self, branch: str) -> Path:
        return self.root / f"@{branch}"

    def commit(self, branch: str) -> None:
        self._request("commit", branch=branch)

    def abort(self, branch: str) -> None:
        self._request("abort", branch=branch)

    def daemons(self) -> list[int]:
        pid = self._request("info")["pid"]
        assert isinstance(pid, int)
        return [pid]

    def requests(self) -> dict[str, int]:
        """Returns how many requests of each kind the kernel has sent since the mount."""
        counts = self._request("requests")
        return {kind: count for kind, count in counts.items() if isinstance(count, int)}

    def _request(self, verb: str, **fields: object) -> dict[str, object]:
        assert self.socket
        try:
            return self.socket.request(verb, fields)
        except RequestRefused as refused:
            raise Cannot(refused.message) from refused
