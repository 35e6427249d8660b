"""What the caller asks the server to start: one value, pickled on one side and read on the other.

The way from the caller inwards is trusted, so pickle may serve. The way back is not: see
`function_pickle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from branching.process.sandbox.config import Sandbox

HERE = b"here"
"""What a process that is ready says at the gate; anything else is why it is not."""


class Request(NamedTuple):
    """One process to be started in a sandbox."""

    sandbox: Sandbox
    owner: tuple[int, int] | None
    """Uid and gid to become; None to stay who we are."""
    user: tuple[int, int]
    """Uid and gid of the caller."""
    is_sandboxed: bool
    """False: nothing is hidden or forbidden, and only the sandbox's directory is heeded."""
    is_user_namespace: bool
    is_limited: bool
    """The caller has something to do before anything runs: to put it under its limits."""
    environment: Mapping[str, str]
    numbers: tuple[int, ...]
    """Of the descriptors that are sent along: the numbers they are to have."""
    ignored_signals: tuple[int, ...]
    umask: int
    terminal: int | None
    """Number of the descriptor that is a terminal on which the child is to be in front."""
    is_terminal_own: bool
    """It is nobody else's: the sandbox is a session of its own on it."""
    wall_seconds: float | None = None
    argv: tuple[str, ...] = ()
    """The command; () for a function."""
    call: bytes = b""
    """The function, packed by `function_pickle`."""
    result: int = -1
    """Number of the descriptor that takes the function's result; -1 if it has none."""
    path: tuple[str, ...] = ()
    """The caller's sys.path, for a function."""
    mounter: int = -1
    """Of a memory session: number of the descriptor on which the mount helper takes requests. The
    process itself does not get it."""

    @property
    def is_session(self) -> bool:
        """Whether the process may fork children that see other branches; see `mount_helper`."""
        return self.mounter >= 0
