"""The caller: what it is decides how a sandbox is made, and what a process in it inherits."""

from __future__ import annotations

import os
import re
import signal
from functools import cache
from typing import NamedTuple

from branching._linux import syscalls

_ROW = re.compile(rb"^(CapEff|SigIgn|Umask):\s*([0-9a-f]+)$", re.MULTILINE)


class ParentState(NamedTuple):
    """This program, at the moment."""

    umask: int
    ignored_signals: tuple[int, ...]
    """Those that we ignore because our caller did (nohup)."""
    is_privileged: bool
    """We may make namespaces without being root in one of our own first."""

    @staticmethod
    def read() -> ParentState:
        """Looks it up where reading changes nothing: os.umask() can only be read by setting it,
        which other threads would notice.
        """
        with open("/proc/thread-self/status", "rb", buffering=0) as status:
            found = dict(_ROW.findall(status.read()))
        ignored = int(found[b"SigIgn"], 16)
        return ParentState(
            umask=int(found[b"Umask"], 8),
            ignored_signals=tuple(n for n in _heeded() if ignored >> (n - 1) & 1),
            is_privileged=_may_make_namespaces(int(found[b"CapEff"], 16)),
        )


def _may_make_namespaces(capabilities: int) -> bool:
    return os.geteuid() == 0 and bool(capabilities >> syscalls.CAP_SYS_ADMIN & 1)


@cache
def _heeded() -> tuple[int, ...]:
    """Some engines ignore all signals. Python itself ignores two; those that the C library keeps to
    itself nobody can set.
    """
    return tuple(map(int, signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}))
