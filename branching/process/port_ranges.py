"""A range of port numbers for each command that runs in a branch.

Ten servers of one project, each in a branch of its own, want the same port. So each command is
lent `PORTS_EACH` numbers that no other command of ours in the same network has meanwhile, on this
machine, whoever started it. What holds a range is a Unix socket with an abstract name: the kernel
keeps such names per network namespace, as it keeps ports, and frees them when their process dies.

The numbers lie below those the kernel gives to clients. A range in which a stranger listens is
passed over; one who comes later is not kept away.
"""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from branching.errors import ProcessBranchError

PORTS_EACH = 10
FIRST_PORT = 20_000
PAST_LAST_PORT = 32_760
"""The kernel's own ports for clients begin at 32768."""

_RANGES = (PAST_LAST_PORT - FIRST_PORT) // PORTS_EACH
_turn = itertools.count()
"""Where to look first: a range just given back may still have connections that linger."""


@contextmanager
def reserve_ports() -> Iterator[int]:
    """Yields the first of `PORTS_EACH` ports that are the caller's for the length of the `with`.

    Raises ProcessBranchError when every range is lent.
    """
    start = next(_turn)
    for step in range(_RANGES):
        base = FIRST_PORT + (start + step) % _RANGES * PORTS_EACH
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as holder:
            try:
                holder.bind(f"\0branching-ports-{base}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            if _is_free(base):
                yield base
                return
    raise ProcessBranchError(
        f"no range of {PORTS_EACH} free ports is left between {FIRST_PORT} and {PAST_LAST_PORT}: "
        f"{_RANGES} commands in branches may run at a time",
        hint="run fewer at once (max_parallel)",
        limit="ports",
    )


def _is_free(base: int) -> bool:
    """Tells whether nobody listens on any port of the range."""
    for port in range(base, base + PORTS_EACH):
        with socket.socket() as probe, suppress(OSError):
            # A connection that lingers from a server before does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            continue
        return False
    return True
