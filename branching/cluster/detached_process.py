"""Starts a process that outlives this one and the engine's, which may kill all of its own.

    python -m branching.cluster.detached_process MODULE ARGUMENT…

It forks before it imports anything, so its starter does not wait for the module.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.setsid()

import runpy
import subprocess
from collections.abc import Sequence


def start_detached(module: str, *arguments: str, descriptors: Sequence[int]) -> None:
    """Runs a module as a process of its own, without standard streams.

    Args:
        module: The module, whose `__main__` part is run.
        arguments: Its arguments.
        descriptors: Open files that it inherits; their numbers follow the arguments.
    """
    subprocess.run(
        [sys.executable, "-m", __name__, module, *arguments, *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=descriptors,
        start_new_session=True,
        check=False,
    )


if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
