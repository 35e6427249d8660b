"""The part of Docker's Engine API that a command in a warm container needs, spoken over the socket without the SDK.

A whole `exec -- true` takes 70 ms this way. By the docker command it takes 100 ms, and importing the SDK takes 125 ms.
This module imports nothing else that is slow: `_socket` and not `socket`, which takes 7 ms, and JSON is written and
read by hand. Everything else asks the engine through `engine`.

`docker exec --interactive` is three requests: create an exec, start it, inspect it for the exit code. The second turns
its connection into the command's streams. What we send is the command's standard input, half closed at the end of ours.
What we receive are frames:

    stream (1 out, 2 err), 0, 0, 0, length (4 bytes, big endian), bytes

One loop waits for both directions and buffers at most one block of input, so a command that writes before it reads
cannot block with us. Terminals are not handled here: raw mode, window sizes and detach keys are the docker command's
job. Requests are HTTP/1.0, so a reply ends with its connection, and their paths name no API version, so any engine
answers.
"""

from __future__ import annotations

import _socket
import os
import select

TYPE_CHECKING = False  # see docker_context
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_SECONDS = 60.0
READ_BYTES = 1 << 16
HEADER_BYTES = 8
HEAD_BYTES_MAX = 1 << 16
SWITCHED = (b"101", b"200")
"""Status codes after which the stream follows. Engines send 200 to a client that did not ask to switch protocols."""
BROKEN_PIPE = 13
CONTAINER_KILLED = 137
"""The exit code when the container is killed, and the command with it."""


def request(method: str, path: str, *, at: str, body: bytes = b"") -> bytes:
    """Sends one request to the engine's socket `at`, with `body` as JSON, and returns the reply's body.

    Raises:
        OSError: the engine does not answer, or answers with an error.
    """
    head = f"{method} {path} HTTP/1.0\r\nHost: docker\r\n"
    if body:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    reply = b""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(TIMEOUT_SECONDS)
        connection.connect(at)
        connection.sendall(head.encode() + b"\r\n" + body)
        while block := connection.recv(READ_BYTES):
            reply += block
    finally:
        connection.close()
    head_of_reply, _, content = reply.partition(b"\r\n\r\n")
    if head_of_reply.split(b" ", 2)[1:2] not in ([b"200"], [b"201"]):
        raise OSError(content.decode(errors="replace"))
    return content


def list_containers(filters: str, *, at: str) -> bytes:
    """Returns the engine's list of the running containers that match filters in JSON; raises as `request` does."""
    quoted = "".join(f"%{byte:02X}" for byte in filters.encode())
    return request("GET", f"/containers/json?filters={quoted}", at=at)


def create_exec(
    container: str, argv: Sequence[str], *, at: str, environ: Sequence[str] = (), user: str = ""
) -> str | None:
    """Creates an exec, which does not run yet, and returns its id.

    Returns None if the engine refuses, or if an argument is not UTF-8.
    """
    try:
        words, variables = (",".join(to_json(text) for text in texts) for texts in (argv, environ))
        streams = '"AttachStdin":true,"AttachStdout":true,"AttachStderr":true'
        body = f'{{{streams},"User":{to_json(user)},"Env":[{variables}],"Cmd":[{words}]}}'.encode()
        created = request("POST", f"/containers/{container}/exec", at=at, body=body)
    except (OSError, UnicodeEncodeError):
        return None
    return created.partition(b'"Id":"')[2][:64].decode() or None


def start_exec(identifier: str, *, at: str) -> tuple[_socket.socket, bytes] | None:
    """Starts an exec and returns its connection and the first bytes received; None if it did not start."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(at)
        body = b'{"Detach":false,"Tty":false}'
        head = f"POST /exec/{identifier}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        reply = b""
        while b"\r\n\r\n" not in reply and len(reply) < HEAD_BYTES_MAX:
            if not (block := connection.recv(READ_BYTES)):
                break
            reply += block
    except OSError:
        connection.close()
        return None
    head_of_reply, end, rest = reply.partition(b"\r\n\r\n")
    if not end or head_of_reply.split(b" ", 2)[1:2] not in ([code] for code in SWITCHED):
        connection.close()
        return None
    return connection, rest


def pump_streams(connection: _socket.socket, received: bytes, *, send_signal: Callable[[int], None]) -> None:
    """Passes the three streams to their end.

    Args:
        connection: An exec's, as `start_exec` returns it.
        received: The first bytes that were received over it.
        send_signal: Called with the number of SIGPIPE when the reader of our standard output or error has gone.
    """
    connection.setblocking(False)
    unsent, buffer, closed = b"", bytearray(received), set[int]()
    is_input_open = True
    while True:
        closed_before = len(closed)
        write_frames(buffer, closed)
        if len(closed) > closed_before == 0:
            send_signal(BROKEN_PIPE)
        reading: list[int | _socket.socket] = [connection]
        if is_input_open and not unsent:
            reading.append(0)
        ready, writable, _ = select.select(reading, [connection] if unsent else [], [])
        try:
            if writable:
                unsent = unsent[connection.send(unsent) :]
            if 0 in ready:
                unsent = read_input()
                if not unsent:
                    is_input_open = False
                    connection.shutdown(_socket.SHUT_WR)
            if connection in ready:
                block = connection.recv(READ_BYTES)
                if not block:
                    return
                buffer += block
        except BlockingIOError:
            continue
        except OSError:  # the command has ended without reading all input: its output is still to be read
            unsent, is_input_open = b"", False


def read_input() -> bytes:
    """Returns a block of our standard input, empty at its end or if it is closed."""
    try:
        return os.read(0, READ_BYTES)
    except OSError:
        return b""


def write_frames(buffer: bytearray, closed: set[int]) -> None:
    """Moves the complete frames in `buffer` to our outputs; adds an output without a reader to `closed`."""
    place = 0
    while len(buffer) - place >= HEADER_BYTES:
        stream, length = buffer[place], int.from_bytes(buffer[place + 4 : place + HEADER_BYTES], "big")
        end = place + HEADER_BYTES + length
        if end > len(buffer):
            break
        if stream not in closed:
            try:
                write_block(stream, memoryview(bytes(buffer[place + HEADER_BYTES : end])))
            except OSError:
                closed.add(stream)
        place = end
    del buffer[:place]


def write_block(stream: int, block: memoryview) -> None:
    """Writes all of a block, also to a non-blocking stream."""
    while block:
        try:
            block = block[os.write(stream, block) :]
        except BlockingIOError:
            select.select([], [stream], [])


def wait_exec(identifier: str, *, at: str) -> int:
    """Returns the exit code of an exec whose streams have ended; CONTAINER_KILLED if its container is gone."""
    while True:
        try:
            state = request("GET", f"/exec/{identifier}/json", at=at)
        except OSError:
            return CONTAINER_KILLED
        # A quote inside a JSON text is escaped, so this can only be the field.
        if b'"Running":false' in state:
            code = state.partition(b'"ExitCode":')[2].partition(b",")[0].strip(b" }\n")
            return int(code) if code.isdigit() else CONTAINER_KILLED
        select.select([], [], [], 0.005)


def to_json(text: str) -> str:
    """Returns a text as JSON.

    Raises:
        UnicodeEncodeError: it holds bytes that are not UTF-8.
    """
    text.encode()
    return '"' + "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\' else c for c in text) + '"'
