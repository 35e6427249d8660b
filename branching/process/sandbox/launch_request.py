"""What the caller asks the server to start: one value, pickled on one side and read on the other.

The way from the caller inwards is trusted, so pickle may serve. The way back is not: see
`function_pickle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from branching.process.sandbox.config import Sandbox

HERE = b"here"
"""The message at the gate of a process that is ready; any other message is an error."""


class Request(NamedTuple):
    """One process to be started in a sandbox."""

    sandbox: Sandbox
    owner: tuple[int, int] | None
    """Uid and gid to become; None to keep those of the caller."""
    user: tuple[int, int]
    """Uid and gid of the caller."""
    is_sandboxed: bool
    """False: nothing is hidden or forbidden, and of the sandbox only the directory counts."""
    is_user_namespace: bool
    is_limited: bool
    """The process waits at the gate until the caller has put it under its limits."""
    environment: Mapping[str, str]
    numbers: tuple[int, ...]
    """The numbers that the sent descriptors get in the process."""
    ignored_signals: tuple[int, ...]
    umask: int
    terminal: int | None
    """Number of the descriptor of the terminal whose foreground process the child becomes."""
    is_terminal_own: bool
    """No other process uses it: the sandbox becomes a session of its own on it."""
    wall_seconds: float | None = None
    argv: tuple[str, ...] = ()
    """The command; () for a function."""
    call: bytes = b""
    """The function, packed by `function_pickle`."""
    result: int = -1
    """Number of the descriptor to which the function's result is written; -1 without one."""
    path: tuple[str, ...] = ()
    """The caller's sys.path, for a function."""
    preload: tuple[str, ...] = ()
    """Modules that are imported before privileges are given up. The owner of a workspace
    may not be able to read them, nor the standard library: they may lie in /root."""
    mounter: int = -1
    """Of a memory session: number of the descriptor of the mount helper's requests. The process
    itself does not get it."""

    @property
    def is_session(self) -> bool:
        """Whether the process may fork children that see other branches; see `mount_helper`."""
        return self.mounter >= 0
