"""The control socket: a Unix socket through which other processes reach the run controller.

    STORE/logs/9f3c2a1b.door      the socket; each entry of the run log names it (`Entry.door`)
    STORE/logs/9f3c2a1b.steer/    the message files of running candidates

Request and reply are one JSON object on one line each. A connection carries one exchange:

    {"v": 1, "do": "pause", "branch": "speculate-1a2b3c4d-0"}         {"ok": true}
    {"v": 1, "do": "tell", "branch": "…", "text": "try the cache"}    {"error": "…"}

`do` is one of pause, resume, stop, tell, keep, or ping, which has no effect. The owner of the
workspace, the user who runs the call, and root may send requests. Only the owner has access to the
directory and the socket, and the server checks the peer's credentials from the kernel. Commands in
branches cannot reach the store.

A socket is created under a temporary name and renamed when it is listening. A socket that does not
respond therefore belongs to a killed process. The next call removes it.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from branching.errors import BranchError, BranchingError
from branching.runlog.run_controller import RunController

VERSION = 1
SUFFIX = ".door"
STEER_SUFFIX = ".steer"
ASKING_SECONDS_MAX = 10.0
"""Maximum time for a client to send its request. A stopped client must not block the others."""
ANSWERING_SECONDS_MAX = 60.0
"""Maximum time to wait for a reply. The server handles one request at a time."""
REQUEST_BYTES_MAX = 65536
_CREDENTIALS = struct.Struct("=iII")


class ControlServer:
    """Serves the socket in a thread until `close()`.

    Args:
        directory: The descriptor of the directory of the socket.
        owner: Uid and gid for the socket, if this process is root.
        controller: What it controls.
        is_started: Start the thread. Otherwise requests wait until `start` is called.

    Raises:
        OSError: The socket cannot be created.
    """

    def __init__(
        self,
        directory: int,
        owner: tuple[int, int],
        controller: RunController,
        *,
        is_started: bool = True,
    ) -> None:
        self._directory = os.dup(directory)
        self._welcome = {0, os.geteuid(), owner[0]}
        self._actions: dict[str, Callable[[str, str], None]] = {
            "ping": lambda _branch, _text: None,
            "pause": lambda branch, _: controller.pause(branch),
            "resume": lambda branch, _: controller.pause(branch, is_on=False),
            "stop": lambda branch, _: controller.stop(branch),
            "tell": controller.tell,
            "keep": lambda branch, _: controller.keep(branch),
        }
        self.name = f"{os.urandom(4).hex()}{SUFFIX}"
        self._steer_name = self.name.replace(SUFFIX, STEER_SUFFIX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.mkdir(self._steer_name, 0o700, dir_fd=directory)
            controller.directory = Path(
                f"/proc/self/fd/{self._directory}/{self._steer_name}"
            ).resolve()
            self._open(owner)
        except BaseException:
            self._socket.close()
            self._remove()
            raise
        self._thread: threading.Thread | None = None
        if is_started:
            self.start()

    def fileno(self) -> int:
        """Returns the descriptor that is readable when a client waits for `start`."""
        return self._socket.fileno()

    def start(self) -> None:
        """Starts the thread that serves the clients."""
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the server and removes the socket."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() would not
        except OSError:
            pass
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        self._remove()

    def _remove(self) -> None:
        """Removes the existing files. Some are missing after a failed start or without a store."""
        for remove, name in (
            (os.unlink, f".{self.name}"), (os.unlink, self.name), (os.rmdir, self._steer_name)
        ):  # fmt: skip
            try:
                remove(name, dir_fd=self._directory)
            except FileNotFoundError:
                pass
        os.close(self._directory)

    def _open(self, owner: tuple[int, int]) -> None:
        passing = f".{self.name}"
        # The path of a socket is limited to 107 bytes, and that of the store may be longer. The
        # path through the directory's descriptor is always short.
        self._socket.bind(f"/proc/self/fd/{self._directory}/{passing}")
        os.chmod(passing, 0o600, dir_fd=self._directory)
        if os.geteuid() == 0:
            os.chown(passing, *owner, dir_fd=self._directory, follow_symlinks=False)
        self._socket.listen()
        os.rename(passing, self.name, src_dir_fd=self._directory, dst_dir_fd=self._directory)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                try:
                    self._answer(connection)
                except OSError:
                    pass  # the client is gone or too slow, and cannot receive an error

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(ASKING_SECONDS_MAX)
        told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(told)[1]
        line = _line_of(connection)  # closing a connection with unread data discards the reply
        reply: dict[str, Any] = {"error": f"user {user} is not allowed to control this call"}
        if user in self._welcome:
            reply = self._reply(line)
        connection.sendall(json.dumps(reply).encode() + b"\n")

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if request["v"] != VERSION:
                return {"error": f"version {request['v']} is not supported, only {VERSION} is"}
            deed = self._actions[request["do"]]
            branch, text = str(request.get("branch", "")), str(request.get("text", ""))
        except (ValueError, KeyError, TypeError):
            return {"error": "it is not a request"}
        try:
            deed(branch, text)
        except (BranchingError, OSError) as error:
            return {"error": str(error)}
        return {"ok": True}


def send_request(control_server: Path, do: str, branch: str = "", text: str = "") -> None:
    """Sends a request to a control socket and waits until it is carried out.

    Raises:
        BranchError: The request was refused or failed, or the program does not respond.
    """
    try:
        reply = _exchange(control_server, {"v": VERSION, "do": do, "branch": branch, "text": text})
    except (OSError, ValueError) as error:
        raise BranchError(
            f"the program that runs branch {branch!r} does not answer ({error}); nothing was done",
            branch=branch,
        ) from error
    if "error" in reply:
        raise BranchError(str(reply["error"]), branch=branch)


def is_alive(control_server: Path) -> bool:
    """Returns whether the program that serves a socket is alive; True if this is unknown.

    The kernel accepts the connection, so a program that is busy or stopped does not delay it.
    """
    try:
        with _connected(control_server):
            return True
    except (ConnectionRefusedError, FileNotFoundError):
        return False
    except OSError:
        return True


def remove_stale(directory: Path) -> None:
    """Removes the sockets of programs that were killed."""
    for control_server in directory.glob(f"*{SUFFIX}"):
        if not control_server.name.startswith(".") and not is_alive(control_server):
            import shutil

            shutil.rmtree(control_server.with_suffix(STEER_SUFFIX), ignore_errors=True)
            control_server.unlink(missing_ok=True)


@contextmanager
def _connected(control_server: Path) -> Iterator[socket.socket]:
    directory = os.open(control_server.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWERING_SECONDS_MAX)
            if stat.S_ISLNK(os.lstat(control_server.name, dir_fd=directory).st_mode):
                raise ConnectionRefusedError(f"{control_server} is a symbolic link")
            connection.connect(f"/proc/self/fd/{directory}/{control_server.name}")
            yield connection
    finally:
        os.close(directory)


def _exchange(control_server: Path, request: dict[str, Any]) -> dict[str, Any]:
    with _connected(control_server) as connection:
        connection.sendall(json.dumps(request).encode() + b"\n")
        reply = json.loads(_line_of(connection))
    if not isinstance(reply, dict):
        raise ValueError("the answer is not a JSON object")
    return reply


def _line_of(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < REQUEST_BYTES_MAX:
        arrived = connection.recv(4096)
        if not arrived:
            break
        line += arrived
    return line
