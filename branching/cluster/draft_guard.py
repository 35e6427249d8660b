"""A process that removes a base which is being unpacked, if the unpacking process is killed.

The two share a pipe. The kernel closes it when the unpacking process ends, in whatever way. The
guard then opens the directory as a workspace, which takes over the mount that the killed process
left, and so unmounts it. It belongs to no process of the engine that runs attempts, which may kill
all of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from branching.cluster.detached_process import start_detached


@contextmanager
def guarded(draft: Path) -> Iterator[None]:
    """Removes a directory, and unmounts it, if this process is killed in the `with`."""
    reading, writing = os.pipe()
    try:
        try:
            start_detached(__name__, str(draft), descriptors=[reading])
        finally:
            os.close(reading)
        yield
    finally:
        with suppress(BrokenPipeError):  # the guard was killed, or did not start
            os.write(writing, b".")
        os.close(writing)


def _main(draft: Path, reading: int) -> None:
    if os.read(reading, 1):
        return  # it is unpacked
    from branching.errors import BranchingError
    from branching.fs import Workspace

    with suppress(BranchingError), Workspace.open(draft):
        pass
    shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
