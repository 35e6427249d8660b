"""Union file systems by hand: the kernel's overlayfs and Debian's fuse-overlayfs, a mount a branch.

A child of a branch lies over its parent's upper directory, as it is then. Neither has a commit.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ..field.contestant import Cannot, Contestant, children_named, need, run


class KernelOverlay(Contestant):
    name = "kernel overlayfs"

    def begin(self, base: Path, scratch: Path) -> None:
        super().begin(base, scratch)
        self.lowers: dict[str, list[Path]] = {}

    def end(self) -> None:
        for branch in list(self.lowers):
            self.abort(branch)

    def create(self, name: str, parent: str | None = None) -> str:
        place = self.scratch / name
        for part in ("upper", "work", "merged"):
            (place / part).mkdir(parents=True)
        lowers = [self.scratch / parent / "upper", *self.lowers[parent]] if parent else [self.base]
        layers = (
            f"lowerdir={':'.join(map(str, lowers))},upperdir={place}/upper,workdir={place}/work"
        )
        self.mount(layers, place / "merged")
        self.lowers[name] = lowers
        return name

    def mount(self, layers: str, place: Path) -> None:
        run("mount", "-t", "overlay", "overlay", "-o", layers, place)

    def path(self, branch: str) -> Path:
        return self.scratch / branch / "merged"

    def abort(self, branch: str) -> None:
        self.lowers.pop(branch)
        done = subprocess.run(["umount", self.path(branch)], capture_output=True, check=False)
        if done.returncode:  # something looks into it still: it goes when that is over
            run("umount", "--lazy", self.path(branch))
        shutil.rmtree(self.scratch / branch)


class FuseOverlay(KernelOverlay):
    name = "fuse-overlayfs"

    def check(self) -> None:
        need("fuse-overlayfs", "fuse-overlayfs")
        if not Path("/dev/fuse").exists():
            raise Cannot("there is no /dev/fuse")

    def mount(self, layers: str, place: Path) -> None:
        run("fuse-overlayfs", "-o", layers, place)

    def daemons(self) -> list[int]:
        return children_named(str(self.scratch))
