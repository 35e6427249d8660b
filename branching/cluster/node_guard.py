"""A process on a node that keeps the mount of a base while attempts use it, and removes it then.

    bases/3f9a….guard       locked by the guard of a base; there is at most one

An attempt that is killed, with its node's engine for instance, leaves a branch and a mount. The
guard notices that no other process uses the mount, drops the branches and unmounts. It is started
by the first attempt, and belongs to no process of the engine.

The order matters: an attempt has opened the mount before it looks for a guard; a guard gives its
lock up before it looks for attempts for the last time. A guard uses the mount from its start, by a
descriptor that it inherits: so a mount that short attempts have left is not mounted again for it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from branching._linux import flock
from branching.cluster.detached_process import start_detached

if TYPE_CHECKING:
    from branching.cluster.base_cache import BaseCache
    from branching.fs import Workspace

IDLE_SECONDS = 1.0
"""How long a mount stays without an attempt. Mounting takes as long as a short attempt."""
_POLL_SECONDS = 0.25


def start_guard(cache: BaseCache, digest: str, space: Workspace) -> None:
    """Starts the guard of a base, which the caller has opened as `space`, unless there is one."""
    with ExitStack() as stack:
        lock = os.open(cache.guard_path(digest), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, lock)
        if not flock.try_lock(lock):
            return  # there is one
        use = os.open(space.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, use)
        flock.lock(use, is_shared=True)
        start_detached(__name__, str(cache.directory), digest, descriptors=[lock, use])


def _main(directory: Path, digest: str, lock: int, use: int) -> None:
    from branching.cluster.base_cache import BaseCache
    from branching.fs import Workspace
    from branching.fs.branch_leases import drop_leased

    def is_missing(_: object) -> None:
        raise FileNotFoundError(digest)

    with suppress(PermissionError):  # Ray's workers have a low one, and what they leave would stay
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    cache = BaseCache(directory)
    with cache.unpacked(is_missing, digest) as base, Workspace.open(base) as space:
        os.close(use)
        idle_since = time.monotonic()
        while True:
            time.sleep(_POLL_SECONDS)
            if space.is_shared():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > IDLE_SECONDS:
                flock.unlock(lock)
                if not space.is_shared():
                    break
                if not flock.try_lock(lock):
                    break  # the next guard is there
                idle_since = time.monotonic()
        drop_leased(space)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
