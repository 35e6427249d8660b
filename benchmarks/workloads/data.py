"""Reading and writing content: in a stream, in pieces of 4 KiB, and one byte in a big file."""

from __future__ import annotations

import os
import random
from pathlib import Path

from ..field.race import Turn, Workload
from ..field.sizes import MIB, Size

PIECE = 4096


def _base(directory: Path, size: Size) -> None:
    block = os.urandom(MIB)
    for name, count in (("stream", size.stream_bytes), ("big", size.big_file_bytes)):
        with (directory / name).open("wb") as file:
            for _ in range(count // MIB):
                file.write(block)


def _work(turn: Turn) -> None:
    branch = turn.branch()
    size = turn.size.stream_bytes
    buffer = bytearray(MIB)
    for row in ("", f"read {size // MIB} MiB in a stream, warm"):
        descriptor = os.open(branch / "stream", os.O_RDONLY)
        if not row:  # into the cache
            while os.readv(descriptor, [buffer]):
                pass
        else:
            read = 0
            with turn.timed(row):
                while got := os.readv(descriptor, [buffer]):
                    read += got
            turn.expect(read, size, "bytes read")
        os.close(descriptor)
    chance = random.Random(1)
    places = [chance.randrange(size // PIECE) * PIECE for _ in range(turn.size.small_operations)]
    descriptor = os.open(branch / "stream", os.O_RDONLY)
    with turn.timed("read 4 KiB anywhere, warm", times=len(places)):
        for place in places:
            os.pread(descriptor, PIECE, place)
    os.close(descriptor)

    block = bytes(buffer)
    descriptor = os.open(branch / "made", os.O_RDWR | os.O_CREAT)
    with turn.timed(f"write {size // MIB} MiB in a stream, and fsync"):
        for _ in range(size // MIB):
            os.write(descriptor, block)
        os.fsync(descriptor)
    with turn.timed("write 4 KiB anywhere", times=len(places)):
        for place in places:
            os.pwrite(descriptor, block[:PIECE], place)
    turn.expect(os.fstat(descriptor).st_size, size, "bytes written")
    os.close(descriptor)

    middle = turn.size.big_file_bytes // 2
    with turn.timed(f"one byte in {turn.size.big_file_bytes // MIB} MiB, open to close"):
        descriptor = os.open(branch / "big", os.O_RDWR)
        os.pwrite(descriptor, b"!", middle)
        os.close(descriptor)
    with (branch / "big").open("rb") as file:
        file.seek(middle)
        turn.expect(file.read(1), b"!", "the byte is")


DATA = Workload(name="content", base=_base, work=_work)
