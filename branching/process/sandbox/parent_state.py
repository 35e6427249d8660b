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
    """The state of this program that a sandboxed process inherits."""

    umask: int
    ignored_signals: tuple[int, ...]
    """The signals that this program ignores because its caller did (nohup)."""
    is_privileged: bool
    """Whether it can make namespaces without a user namespace around them."""

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
    """Returns the signals that the process can inherit as ignored.

    Some engines ignore all signals. Python itself ignores two of them.
    """
    return tuple(map(int, signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}))
