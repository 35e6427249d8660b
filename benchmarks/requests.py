#!/usr/bin/env python3
"""Prints how many requests of each kind the kernel sends to BranchFS for common work in a branch.

    benchmarks/requests.py [--branchfs PROGRAM] [--files N] [--json]

Counts do not depend on the machine or its load, as times do: what a change costs or saves shows
here first. Each workload is run twice where its second run differs (caches). Needs root or
fusermount3, and git and tar.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

Counts = dict[str, int]


class Mount:
    """A BranchFS mount over a directory, with the FUSE driver."""

    def __init__(self, program: str, base: Path, mountpoint: Path) -> None:
        self.program, self.mountpoint = program, mountpoint
        self._run("mount", "--driver", "fuse", "--base", str(base), str(mountpoint))
        self._socket = os.fsdecode(os.getxattr(mountpoint, "user.branchfs.control"))

    def _run(self, *words: str) -> None:
        subprocess.run([self.program, *words], check=True, stdout=subprocess.DEVNULL)

    def branch(self, name: str) -> Path:
        self._run("create", name, str(self.mountpoint))
        return self.mountpoint / f"@{name}"

    def requests(self) -> Counts:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(self._socket)
            stream.sendall(b'{"v":1,"verb":"requests"}\n')
            reply: Counts = json.loads(stream.makefile().readline())["ok"]
            return reply

    def unmount(self) -> None:
        self._run("abort", "work", str(self.mountpoint))
        self._run("unmount", str(self.mountpoint))


def walk(directory: Path) -> None:
    for parent, _, names in os.walk(directory):
        for name in names:
            Path(parent, name).lstat()


def read_all(directory: Path) -> None:
    for path in sorted(directory.glob("d*/*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.read(descriptor, 4096)
        os.close(descriptor)


def git_status(directory: Path) -> None:
    subprocess.run(["git", "status", "--porcelain"], cwd=directory, check=True)


def unpack(directory: Path) -> None:
    names = sorted(path.name for path in directory.glob("d*"))
    pack = subprocess.Popen(
        ["tar", "c", "--transform=s,^,new/,", *names], cwd=directory, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "x"], cwd=directory, stdin=pack.stdout, check=True)
    pack.wait()


def remove(directory: Path) -> None:
    subprocess.run(["rm", "-rf", "new"], cwd=directory, check=True)


def append(directory: Path) -> None:
    with (directory / "log").open("ab", buffering=0) as log:
        for _ in range(1000):
            log.write(b"one line of a log\n")


def write_one_byte(directory: Path) -> None:
    descriptor = os.open(directory / "big", os.O_WRONLY)
    os.pwrite(descriptor, b"x", 8 << 20)
    os.close(descriptor)


WORKLOADS: list[tuple[str, Callable[[Path], None]]] = [
    ("git status, first", git_status),
    ("git status, second", git_status),
    ("walk and stat, cold", walk),
    ("walk and stat, warm", walk),
    ("open and read, first", read_all),
    ("open and read, second", read_all),
    ("unpack as many files", unpack),
    ("rm -rf of them", remove),
    ("append 1000 lines", append),
    ("one byte in a big file", write_one_byte),
]


def fill(base: Path, files: int) -> None:
    """Makes a repository of small files, and a big one beside it; all older than the index."""
    for number in range(files):
        path = base / f"d{number // 50}" / f"f{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number}\n" * 100)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    (base / "big").write_bytes(bytes(20 << 20))
    git = ["git", "-c", "user.name=bench", "-c", "user.email=bench@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"], ["status", "-s"]):
        subprocess.run([*git, *words], cwd=base, check=True)


def measure(program: str, files: int) -> dict[str, Counts]:
    with tempfile.TemporaryDirectory() as directory:
        base, mountpoint = Path(directory, "base"), Path(directory, "mount")
        base.mkdir()
        mountpoint.mkdir()
        fill(base, files)
        mount = Mount(program, base, mountpoint)
        try:
            branch, measured = mount.branch("work"), {}
            for name, work in WORKLOADS:
                before = mount.requests()
                work(branch)
                after = mount.requests()
                counts = {kind: count - before.get(kind, 0) for kind, count in after.items()}
                measured[name] = {kind: count for kind, count in counts.items() if count}
        finally:
            mount.unmount()
        return measured


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    built = os.environ.get("BRANCHFS") or str(root / "branchfs/target/release/branchfs")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--branchfs", default=built, metavar="PROGRAM")
    parser.add_argument("--files", type=int, default=1000, metavar="N")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure(options.branchfs, options.files)
    if options.json:
        print(json.dumps({"files": options.files, "requests": measured}, indent=2))
        return
    print(f"{options.files} files")
    for name, counts in measured.items():
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
        print(f"  {name:24} {sum(counts.values()):7}  {told}")


if __name__ == "__main__":
    main()
