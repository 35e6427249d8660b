"""A range of port numbers for each command that runs in a branch.

Several copies of a server, each in its own branch, would use the same port. So each command gets
`PORTS_EACH` port numbers that no other command in a branch has in the same network namespace. A
range is reserved by a Unix socket with an abstract name. Like ports, abstract names belong to a
network namespace, and the kernel frees them when their process dies.

The ranges are below the kernel's range for outgoing connections. A range with a port in use is
skipped. Other programs can bind a reserved port later.
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
"""The kernel's range for outgoing connections starts at 32768."""

_RANGES = (PAST_LAST_PORT - FIRST_PORT) // PORTS_EACH
_turn = itertools.count()
"""The first range to try. A range that was just released may have connections in TIME_WAIT."""


@contextmanager
def reserve_ports() -> Iterator[int]:
    """Reserves a range of `PORTS_EACH` ports for the length of the `with`.

    Yields:
        The first port of the range.

    Raises:
        ProcessBranchError: All ranges are in use.
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
        f"{_RANGES} commands in branches can run concurrently",
        hint="run fewer concurrently (max_parallel)",
        limit="ports",
    )


def _is_free(base: int) -> bool:
    """Returns whether no program listens on a port of the range."""
    for port in range(base, base + PORTS_EACH):
        with socket.socket() as probe, suppress(OSError):
            # Connections in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            continue
        return False
    return True
