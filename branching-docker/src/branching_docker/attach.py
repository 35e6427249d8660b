"""A command in a running container over the engine's socket, with three streams: `docker exec --interactive`.

The docker command would do, and takes as long to load as the rest takes to run. Three requests: make an exec, start it,
ask how it ended. The second turns the connection into the command's streams: what goes in is its standard input, half
closed at the end of ours; what comes out are frames,

    stream (1 out, 2 err), 0, 0, 0, length (4 bytes, big end first), bytes

One loop waits for both sides and keeps at most one block of input that the engine has not taken yet, so that a command
which writes before it reads cannot block with us. Not for terminals: raw mode, sizes and keys are docker's affair.
"""

from __future__ import annotations

import _socket
import os
import select

from branching_docker import api

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READ_BYTES = 1 << 16
HEADER_BYTES = 8
HEAD_BYTES_MAX = 1 << 16
SWITCHED = (b"101", b"200")
"""Both mean that what follows is the stream: the second is what engines say to one who did not ask to switch."""
BROKEN_PIPE = 13
GONE = 137
"""The exit code when the container is killed under the command, which is killed with it."""


def begin(container: str, argv: Sequence[str], *, at: str, environ: Sequence[str] = (), user: str = "") -> str | None:
    """Makes an exec and returns its id; nothing runs yet. None if the engine will not, or a word is not UTF-8."""
    try:
        words, variables = (",".join(quoted(text) for text in texts) for texts in (argv, environ))
        streams = '"AttachStdin":true,"AttachStdout":true,"AttachStderr":true'
        body = f'{{{streams},"User":{quoted(user)},"Env":[{variables}],"Cmd":[{words}]}}'.encode()
        made = api.request("POST", f"/containers/{container}/exec", at=at, body=body)
    except (api.RefusedError, UnicodeEncodeError):
        return None
    return made.partition(b'"Id":"')[2][:64].decode() or None


def start(identifier: str, *, at: str) -> tuple[_socket.socket, bytes] | None:
    """Starts an exec and returns its connection, with what has come already; None where it did not start."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(at)
        body = b'{"Detach":false,"Tty":false}'
        head = f"POST /exec/{identifier}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        reply = b""
        while b"\r\n\r\n" not in reply and len(reply) < HEAD_BYTES_MAX:
            if not (more := connection.recv(READ_BYTES)):
                break
            reply += more
    except OSError:
        connection.close()
        return None
    head_of_reply, end, rest = reply.partition(b"\r\n\r\n")
    if not end or head_of_reply.split(b" ", 2)[1:2] not in ([code] for code in SWITCHED):
        connection.close()
        return None
    return connection, rest


def converse(connection: _socket.socket, come: bytes, *, end: Callable[[int], None]) -> None:
    """Passes the three streams to their end. If nobody reads ours any more, `end` is called with SIGPIPE's number."""
    connection.setblocking(False)
    waiting, coming, closed = b"", bytearray(come), set[int]()
    is_input_open = True
    while True:
        closed_before = len(closed)
        take(coming, closed)
        if len(closed) > closed_before == 0:
            end(BROKEN_PIPE)
        reading: list[int | _socket.socket] = [connection]
        if is_input_open and not waiting:
            reading.append(0)
        ready, writable, _ = select.select(reading, [connection] if waiting else [], [])
        try:
            if writable:
                waiting = waiting[connection.send(waiting) :]
            if 0 in ready:
                waiting = read_input()
                if not waiting:
                    is_input_open = False
                    connection.shutdown(_socket.SHUT_WR)
            if connection in ready:
                more = connection.recv(READ_BYTES)
                if not more:
                    return
                coming += more
        except BlockingIOError:
            continue
        except OSError:  # it has ended without reading what we sent: what it has said is still to be read
            waiting, is_input_open = b"", False


def read_input() -> bytes:
    """Returns a block of our standard input, nothing at its end or if we have none."""
    try:
        return os.read(0, READ_BYTES)
    except OSError:
        return b""


def take(coming: bytearray, closed: set[int]) -> None:
    """Writes the whole frames in `coming` to where they belong, and removes them; notes whom nobody reads."""
    place = 0
    while len(coming) - place >= HEADER_BYTES:
        stream, length = coming[place], int.from_bytes(coming[place + 4 : place + HEADER_BYTES], "big")
        until = place + HEADER_BYTES + length
        if until > len(coming):
            break
        if stream not in closed:
            try:
                write(stream, memoryview(bytes(coming[place + HEADER_BYTES : until])))
            except OSError:
                closed.add(stream)
        place = until
    del coming[:place]


def write(stream: int, block: memoryview) -> None:
    """Writes all of a block, also where ours does not block."""
    while block:
        try:
            block = block[os.write(stream, block) :]
        except BlockingIOError:
            select.select([], [stream], [])


def ended(identifier: str, *, at: str) -> int:
    """Returns the exit code of an exec whose streams have ended; GONE where its container is gone."""
    while True:
        try:
            told = api.request("GET", f"/exec/{identifier}/json", at=at)
        except api.RefusedError:
            return GONE
        # Inside of a text a quote has a backslash: this can only be the field.
        if b'"Running":false' in told:
            code = told.partition(b'"ExitCode":')[2].partition(b",")[0].strip(b" }\n")
            return int(code) if code.isdigit() else GONE
        select.select([], [], [], 0.005)


def quoted(text: str) -> str:
    """Returns a text as JSON; raises UnicodeEncodeError for bytes that are none."""
    text.encode()
    return '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\' else c for c in text) + '"'
