"""The client's end of a BranchFS control socket (branchfs/docs/control.md, version 1).

One JSON object a line, one reply line a request. A connection carries one request at a time, so
`ControlSocket` keeps a pool: a thread takes an idle connection or opens one, and gives it back
after the reply. The lock guards the pool alone and is never held during a request: a commit of a
million files in one thread does not delay an abort in another. A connection that was interrupted
or failed is closed, never reused, so a reply cannot be taken for another request's.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from branching._standard_streams import open_closed

VERSION = 1
CONNECT_SECONDS_MAX = 10
"""The daemon accepts at once; this long only when it is stopped or gone wrong."""
IDLE_CONNECTIONS_MAX = 16
"""Enough that a race of candidates does not reconnect for each step."""
_READ_BYTES = 65536

Fields = dict[str, object]


class DaemonGone(Exception):
    """Nobody answers at the socket. Whether a request already sent was carried out is unknown."""


class _NotSent(DaemonGone):
    """The daemon had closed the connection for reading: the request was not carried out."""


class RequestRefused(Exception):
    """The daemon answered with an error; `kind` is one of the table in control.md.

    `path` is what the operating system refused, `step` what a commit was doing there, where the
    error is about that.
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
    """Sends requests to the daemon behind `path`, from any thread and any forked child."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._pid = os.getpid()
        # An unreachable client closes its connections at once, not at some later collection.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def request(
        self,
        verb: str,
        fields: Fields,
        *,
        undo: Callable[[Fields], None] | None = None,
        descriptor: int | None = None,
    ) -> Fields:
        """Sends one request and returns the `ok` part of the reply.

        With `descriptor` the daemon is handed an open file, to write to or to read from.

        An interrupt (Ctrl-C) while the reply is awaited would leave unknown what the daemon did.
        So the reply is read to its end all the same, `undo` is called with what was done, and
        only then the interrupt goes on.

        Raises RequestRefused or DaemonGone.
        """
        line = json.dumps({"v": VERSION, "verb": verb, **_in_utf8(fields)}).encode("ascii") + b"\n"
        try:
            return self._request(self._take(), line, undo, descriptor)
        except _NotSent:
            # The daemon closes connections that are idle where a user has too many.
            return self._request(_Connection(self._path), line, undo, descriptor)

    def _request(
        self,
        connection: _Connection,
        line: bytes,
        undo: Callable[[Fields], None] | None,
        descriptor: int | None,
    ) -> Fields:
        with self._given_back(connection):
            try:
                reply = connection.exchange(line, descriptor)
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
            # A forked child shares its parent's connections: two readers would steal each other's
            # replies. The lock may be held by a thread that does not exist here: make a new one.
            self._lock = threading.Lock()
            _close_all(self._idle)
            self._pid = os.getpid()
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Connection(self._path)


class _Connection:
    """One stream to the daemon. What has arrived of a line is kept, so reading can be resumed."""

    def __init__(self, path: str) -> None:
        open_closed()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._buffer = b""
        try:
            # While more clients come than the daemon has accepted, connect() waits. It does so only
            # on a socket that blocks, so the limit is the kernel's and not Python's.
            self._limit_sending(CONNECT_SECONDS_MAX)
            self._socket.connect(path)
            # A commit takes as long as the disk does: a limit here could only make its outcome
            # unknown. A daemon that dies closes the stream.
            self._limit_sending(0)
        except OSError as error:
            self._socket.close()
            raise DaemonGone(f"cannot connect to {path}: {error.strerror or error}") from error

    def exchange(self, line: bytes, descriptor: int | None = None) -> Fields:
        try:
            if descriptor is not None:
                line = line[socket.send_fds(self._socket, [line], [descriptor]) :]
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
            # Names are bytes: text as this process takes them, whatever its locale.
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
    """Returns the fields with all names as UTF-8 has them, whatever our locale."""
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
