"""The engine's HTTP interface, as far as we ask it: a few questions and removals, over its socket on this machine.

Docker's own library would do, and costs a tenth of a second to load: more than a whole command in a warm container.
Requests say HTTP/1.0, so that a reply is simply what comes until the end; the path names no version, so that any engine
answers with the one it has.
"""

from __future__ import annotations

import _socket  # what `socket` wraps in enums and selectors, a third of a warm command's start

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from branching_docker.errors import EngineError

    Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

TIMEOUT_SECONDS = 60.0
REMOVAL_TIMEOUT_SECONDS = 120.0
NOT_FOUND = 404


class RefusedError(Exception):
    """The engine's answer was an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def get(path: str, *, at: str) -> Json:
    """Asks the engine at the socket `at`.

    Raises EngineError where it does not answer, RefusedError where its answer is an error.
    """
    import json

    return json.loads(request("GET", path, at=at) or b"null")  # type: ignore[no-any-return]


def request(
    method: str, path: str, *, at: str, body: bytes | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> bytes:
    """Sends one request, with a body of JSON if there is one, and returns the reply's body; raises as `get` does."""
    reply = b""
    sent = f"{method} {path} HTTP/1.0\r\nHost: docker\r\n"
    if body is not None:
        sent += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(at)
        connection.sendall(sent.encode() + b"\r\n" + (body or b""))
        while more := connection.recv(1 << 16):
            reply += more
    except OSError as error:
        raise unreachable(error, at) from error
    finally:
        connection.close()
    head, _, content = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        raise unreachable(OSError("its answer is not HTTP"), at)
    if int(status[0]) >= 300:
        raise RefusedError(int(status[0]), explanation(content))
    return content


def explanation(body: bytes) -> str:
    """Returns the sentence in an error's body."""
    import json

    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:500]


def quoted(text: str) -> str:
    """Escapes a text for a request's path."""
    return "".join(f"%{byte:02X}" for byte in text.encode())


def unreachable(error: OSError, at: str) -> EngineError:
    """Returns what to tell a user whose engine did not answer."""
    from branching_docker.errors import EngineError

    if isinstance(error, PermissionError):
        return EngineError(
            f"you may not talk to Docker at unix://{at}.",
            cause=error.strerror,
            hint="sudo usermod -aG docker $USER, then log in again",
        )
    return EngineError(
        f"Docker does not answer at unix://{at}.",
        cause=error.strerror or str(error),
        hint="start it: sudo systemctl start docker, or open Docker Desktop",
    )
