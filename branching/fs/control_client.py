"""A client for the control socket of BranchFS (branchfs/docs/control.md, version 1).

A request is one line of JSON, and so is its reply. A connection carries one request at a time, so
`ControlSocket` keeps a pool: a thread takes an idle connection, or opens one, and returns it after
the reply. The lock guards the pool only and is not held during a request. So a commit of a million
files in one thread does not delay an abort in another. A connection that was interrupted or has
failed is closed and never reused, so that a reply cannot be mistaken for that of another request.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from branching._standard_streams import open_closed

VERSION = 1
CONNECT_SECONDS_MAX = 10
"""The daemon accepts immediately, unless it is stopped or hangs."""
IDLE_CONNECTIONS_MAX = 16
"""Enough to avoid reconnecting during a race with many candidates."""
_READ_BYTES = 65536

Fields = dict[str, object]


class DaemonGone(Exception):
    """The daemon does not answer. A request that was sent may or may not have been executed."""


class _NotSent(DaemonGone):
    """The daemon had closed the connection before: the request was not executed."""


class RequestRefused(Exception):
    """The daemon replied with an error.

    Attributes:
        kind: The kind of error; control.md has a table.
        message: What failed.
        hint: What to do next, or None.
        paths: The paths that the error names, such as those of a conflict.
        path: The path of a failed system call, or None.
        step: The step of a commit that failed, or None.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        hint: str | None,
        paths: tuple[str, ...],
        *,
        path: str | None = None,
        step: str | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.step = step
        self.kind = kind
        self.message = message
        self.hint = hint
        self.paths = paths


class ControlSocket:
    """Sends requests to the daemon at a socket. Safe to use from any thread and after a fork."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        # Closes the connections as soon as the client is unreachable.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def request(
        self,
        verb: str,
        fields: Fields,
        *,
        undo: Callable[[Fields], None] | None = None,
        descriptors: Sequence[int] = (),
    ) -> Fields:
        """Sends a request and waits for the reply.

        After an interrupt (Ctrl-C) during the wait, the reply is still read, `undo` is called with
        it, and then KeyboardInterrupt is raised.

        Args:
            verb: The request's verb.
            fields: The request's fields.
            undo: Reverses the effect of the request, given its reply.
            descriptors: Open files to pass to the daemon, for it to read or write.

        Returns:
            The `ok` part of the reply.

        Raises:
            RequestRefused: The daemon replied with an error.
            DaemonGone: The daemon does not answer.
        """
        line = json.dumps({"v": VERSION, "verb": verb, **_in_utf8(fields)}).encode("ascii") + b"\n"
        try:
            return self._request(self._take(), line, undo, descriptors)
        except _NotSent:
            # The daemon closes idle connections of a user who has too many.
            return self._request(_Connection(self._path), line, undo, descriptors)

    def _request(
        self,
        connection: _Connection,
        line: bytes,
        undo: Callable[[Fields], None] | None,
        descriptors: Sequence[int],
    ) -> Fields:
        with self._given_back(connection):
            try:
                reply = connection.exchange(line, descriptors)
            except KeyboardInterrupt:
                reply = connection.receive()
                if undo is not None and "ok" in reply:
                    undo(_ok(reply))
                raise
        return _ok(reply)

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            _close_all(self._idle)

    @contextmanager
    def _given_back(self, connection: _Connection) -> Iterator[None]:
        try:
            yield
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if len(self._idle) < IDLE_CONNECTIONS_MAX and self._pid == os.getpid():
                self._idle.append(connection)
                return
        connection.close()

    def _take(self) -> _Connection:
        if self._pid != os.getpid():
            # A forked child shares its parent's connections, and each could read the other's
            # replies. The lock may be held by a thread of the parent, so create a new one.
            self._lock = threading.Lock()
            _close_all(self._idle)
            self._pid = os.getpid()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Connection(self._path)


class _Connection:
    """One connection. A partly received line is kept, so that reading can be resumed."""

    def __init__(self, path: str) -> None:
        open_closed()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = b""
        try:
            # connect() waits while the daemon's backlog is full, but only on a blocking socket. So
            # the timeout is a socket option: Python's timeouts make the socket non-blocking.
            self._limit_sending(CONNECT_SECONDS_MAX)
            self._socket.connect(path)
            # No timeout for requests: a commit may take long, and after a timeout its outcome would
            # be unknown. If the daemon dies, the connection is closed.
            self._limit_sending(0)
        except OSError as error:
            self._socket.close()
            raise DaemonGone(f"cannot connect to {path}: {error.strerror or error}") from error

    def exchange(self, line: bytes, descriptors: Sequence[int] = ()) -> Fields:
        try:
            if descriptors:
                line = line[socket.send_fds(self._socket, [line], descriptors) :]
            self._socket.sendall(line)
        except BrokenPipeError as error:
            raise _NotSent(f"the connection broke: {error.strerror or error}") from error
        except OSError as error:
            raise DaemonGone(f"the connection broke: {error.strerror or error}") from error
        return self.receive()

    def receive(self) -> Fields:
        while b"\n" not in self._buffer:
            try:
                arrived = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise DaemonGone(f"the connection broke: {error.strerror or error}") from error
            if not arrived:
                raise DaemonGone("the daemon closed the connection before it answered")
            self._buffer += arrived
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            # File names are bytes; decoded as Python does in this locale.
            reply = json.loads(os.fsdecode(line))
        except ValueError as error:
            raise DaemonGone("the answer is not a line of JSON") from error
        if not isinstance(reply, dict):
            raise DaemonGone("the answer is not a JSON object")
        return reply

    def close(self) -> None:
        self._socket.close()

    def _limit_sending(self, seconds: int) -> None:
        limit = struct.pack("@ll", seconds, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _ok(reply: Fields) -> Fields:
    ok, error = reply.get("ok"), reply.get("error")
    if isinstance(ok, dict):
        return ok
    if not isinstance(error, dict):
        raise DaemonGone("the answer has neither a result nor an error")
    paths = error.get("paths")
    raise RequestRefused(
        str(error.get("kind")),
        str(error.get("message")),
        _text(error.get("hint")),
        tuple(str(path) for path in paths) if isinstance(paths, list) else (),
        path=_text(error.get("path")),
        step=_text(error.get("step")),
    )


def _in_utf8(fields: Fields) -> Fields:
    """Returns the fields with file names encoded as UTF-8, independent of the locale."""
    return {name: _word_in_utf8(value) for name, value in fields.items()}


def _word_in_utf8(value: object) -> object:
    if isinstance(value, str):
        return os.fsencode(value).decode("utf-8", "surrogateescape")
    if isinstance(value, (list, tuple)):
        return [_word_in_utf8(each) for each in value]
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()
