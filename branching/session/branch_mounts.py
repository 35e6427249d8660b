"""Asks the mount helper to show branches to the interpreters of a session."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from branching._linux import fd_passing, syscalls
from branching.errors import MemoryBranchError
from branching.fs import Branch
from branching.session.interpreter import Interpreter

ANSWER_SECONDS_MAX = 60.0


class BranchMounts:
    """The caller's end of the connection to the mount helper. Safe from any thread."""

    def __init__(self, stream: socket.socket, workspace: Path | None) -> None:
        """`workspace` is its mount, if this process may not clone mounts: the daemon has to, or the
        helper where the daemon does not."""
        self._stream = stream
        self._workspace = workspace
        self._count = 0
        self._lock = threading.Lock()  # guards the stream, and what it has said
        self._uncovered: set[int] = set()

    def adopt(self, interpreter: Interpreter) -> None:
        """Takes the branch that an interpreter sees into account."""
        self._ask(b"adopt %d" % self._next(), [interpreter.process])
        self._show(interpreter)

    def attach(self, interpreter: Interpreter, branch: Branch) -> None:
        """Shows a branch to an interpreter."""
        request = b"attach %d" % self._next()
        workspace = self._workspace
        mount = branch.detached_mount() if workspace else syscalls.clone_mount_at(branch.path)
        if workspace and mount is None:
            below = os.fsencode(branch.path.relative_to(workspace))
            self._ask(b"%s %s" % (request, below), [interpreter.process])
        elif mount is not None:
            try:
                self._ask(request, [interpreter.process, mount])
            finally:
                os.close(mount)
        self._show(interpreter)

    def detach(self, interpreter: Interpreter, number: int) -> None:
        """Takes a branch away from an interpreter: its own, or that of which it is a copy."""
        self._ask(b"detach %d" % number, [interpreter.process])

    def kill(self, number: int) -> None:
        """Kills all processes that see a branch."""
        self._ask(b"kill %d" % number, [])

    def bury(self, number: int) -> None:
        """Waits for the end of all processes that see a branch; kills those who live."""
        self._ask(b"bury %d" % number, [])

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _show(self, interpreter: Interpreter) -> None:
        interpreter.mount = self._count
        interpreter.explain = lambda: self._why_ended(interpreter.mount)

    def _why_ended(self, number: int) -> str:
        """Says why the helper has killed those who see a branch, if it has."""
        with self._lock, suppress(OSError):
            while words := json.loads(self._stream.recv(4096, socket.MSG_DONTWAIT) or b"0"):
                self._uncovered.add(words["uncovered"])
        if number in self._uncovered:
            return "a hidden file of its branch was removed or replaced from outside"
        return ""

    def close(self) -> None:
        self._stream.close()

    def _ask(self, request: bytes, descriptors: list[int]) -> None:
        with self._lock:
            answer = self._answer_to(request, descriptors)
        if not answer:
            raise MemoryBranchError(
                "the mount helper of the session does not answer: the session cannot change its "
                "branch any more",
                hint="abort the session and start another",
            )
        if answer["errno"]:
            raise MemoryBranchError(
                f"{answer['step']} failed: {os.strerror(answer['errno'])}",
                hint="abort the session and start another",
            )

    def _answer_to(self, request: bytes, descriptors: list[int]) -> dict[str, Any]:
        """Returns the answer; {} if the helper is gone, or stuck in the kernel."""
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        with suppress(OSError):  # it is gone
            fd_passing.send(self._stream, request, descriptors)
            while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                words: dict[str, Any] = json.loads(self._stream.recv(4096) or b"{}")
                if "uncovered" not in words:
                    return words
                self._uncovered.add(words["uncovered"])
        return {}
