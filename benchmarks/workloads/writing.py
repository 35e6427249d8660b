"""Many small files: an archive unpacked, and all of it removed again."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from ..field.contestant import run
from ..field.race import Turn, Workload
from ..field.sizes import Size
from . import tree


def _base(directory: Path, size: Size) -> None:
    tree.make(directory, 10, git=False)
    with tarfile.open(directory / "files.tar", "w") as archive:
        for name in tree.names(size.unpacked_files):
            member = tarfile.TarInfo(f"unpacked/{name}")
            member.size = tree.FILE_BYTES
            archive.addfile(member, io.BytesIO(b"x" * tree.FILE_BYTES))


def _work(turn: Turn) -> None:
    branch = turn.branch()
    (branch / "files.tar").read_bytes()  # everybody's cache has it
    with turn.timed(f"untar {turn.size.unpacked_files} files"):
        run("tar", "-xf", "files.tar", cwd=branch)
    found = sum(1 for path in (branch / "unpacked").rglob("*.txt"))
    turn.expect(found, turn.size.unpacked_files, "files unpacked")
    with turn.timed(f"rm -rf {turn.size.unpacked_files} files"):
        run("rm", "-rf", "unpacked", cwd=branch)
    turn.expect((branch / "unpacked").exists(), False, "the directory is there:")
    turn.expect((branch / "d0/d0/file0.txt").exists(), True, "the rest is there:")


WRITING = Workload(name="writing a tree", base=_base, work=_work)
