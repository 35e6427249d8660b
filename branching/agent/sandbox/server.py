"""The server in the sandbox, which runs commands and accesses files on request.

It imports the standard library only. Each request has its own thread, so a long command does not
block other requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from branching._exit_codes import EXIT_CANNOT_EXECUTE, EXIT_NOT_FOUND, EXIT_SIGNAL_BASE
from branching.agent.sandbox.wire import (
    BODY_BYTES_MAX,
    BadFrame,
    encode_frame,
    read_frame,
    write_frame,
)

Answer = tuple[dict[str, Any], bytes]
_READ_BYTES = 1 << 16
POLL_MILLISECONDS_MAX = 1 << 30
"""The kernel takes a wait as 32 bits; after this one, 12 days, a loop waits again."""


def serve(requests: int, replies: int) -> None:
    """Answers until the requests end; then the sandbox ends, and all that is left in it."""
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    Server(replies).serve(requests)


class Server:
    """The running requests, by id.

    The thread that reads requests never waits for a reply to be written: the client may read the
    reply only after its own request was read.
    """

    def __init__(self, replies: int) -> None:
        self._replies = replies
        self._replying = threading.Lock()  # held while one reply is written
        self._lock = threading.Lock()  # guards all below; held for a moment only
        self._running: dict[int, int | None] = {}  # the process group, once there is one
        self._cancelled: set[int] = set()

    def serve(self, requests: int) -> None:
        while (frame := read_frame(requests)) is not None:
            facts, body = frame
            if facts["op"] == "cancel":
                self._cancel(facts["which"])
                continue
            with self._lock:
                self._running[facts["id"]] = None
            threading.Thread(target=self._answer, args=(facts, body), daemon=True).start()

    def _answer(self, facts: dict[str, Any], body: bytes) -> None:
        number, op = facts.pop("id"), facts.pop("op")
        try:
            if op == "run":
                answer, data = self._run(number, **facts)
            else:
                answer, data = _OPERATIONS[op](body=body, **facts)
        except OSError as error:
            answer = {"errno": error.errno or errno.EIO, "error": str(error.strerror or error)}
            data = b""
        except (ValueError, TypeError) as error:
            answer, data = {"invalid": str(error)}, b""
        with self._lock:
            del self._running[number]
            self._cancelled.discard(number)
        try:
            frame = encode_frame({"id": number, **answer}, data)
        except BadFrame as error:
            answer = {"errno": errno.EMSGSIZE, "error": f"the answer is too long: {error}"}
            frame = encode_frame({"id": number, **answer})
        with self._replying:
            write_frame(self._replies, frame)

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number not in self._running:
                return  # it has been answered
            self._cancelled.add(number)
            group = self._running[number]
            if group is not None:
                _kill_group(group)

    def _run(
        self,
        number: int,
        *,
        argv: list[str],
        env: dict[str, str],
        timeout: float | None,
        output_max: int,
    ) -> Answer:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **env},
                start_new_session=True,
            )
        except OSError as error:
            # With a directory on PATH that its user may not search, a missing program is EACCES.
            path = env.get("PATH", os.environ.get("PATH", os.defpath))
            if isinstance(error, FileNotFoundError) or not _is_there(argv[0], path):
                return _not_started(EXIT_NOT_FOUND, f"{argv[0]}: not found\n")
            return _not_started(EXIT_CANNOT_EXECUTE, f"{argv[0]}: {error.strerror}\n")
        with self._lock:
            self._running[number] = process.pid
            if number in self._cancelled:
                _kill_group(process.pid)
        try:
            output = _Output(process, output_max)
            how = output.collect(timeout)
        finally:
            with self._lock:
                # Before the process is reaped, so that its number cannot be another's meanwhile.
                self._running[number] = None
            returncode = process.wait()
        code = returncode if returncode >= 0 else EXIT_SIGNAL_BASE - returncode
        facts = {"exit_code": code, "how": how, "stdout": len(output.taken[0])}
        return facts, bytes(output.taken[0] + output.taken[1])


class _Output:
    """What a command prints, until it ends; what others print into its pipes then is dropped."""

    def __init__(self, process: subprocess.Popen[bytes], bytes_max: int) -> None:
        self._process = process
        self._bytes_max = bytes_max
        assert process.stdout is not None
        assert process.stderr is not None
        self._files = [process.stdout, process.stderr]
        self.taken = [bytearray(), bytearray()]

    def collect(self, timeout: float | None) -> str:
        """Returns why it ended: "exit", "timeout" or "output"."""
        deadline = None if timeout is None else time.monotonic() + timeout
        how = "exit"
        ended = os.pidfd_open(self._process.pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        by_number = {file.fileno(): index for index, file in enumerate(self._files)}
        for number in by_number:
            os.set_blocking(number, False)
            poll.register(number, select.POLLIN)
        try:
            while True:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0 and how == "exit":
                    how, left = "timeout", None
                    deadline = None
                    _kill_group(self._process.pid)
                ready = [number for number, _ in poll.poll(_milliseconds(left))]
                for number in ready:
                    if number != ended and self._take(by_number[number], number) == b"":
                        poll.unregister(number)
                if self._is_full and how == "exit":
                    how, deadline = "output", None
                    _kill_group(self._process.pid)
                if ended in ready:
                    break
        finally:
            os.close(ended)
        self._release(how)
        return how

    def _release(self, how: str) -> None:
        """Takes what the ended command left in its pipes. Where some background process holds them
        still, they are emptied on: it must not die of writing there."""
        held = []
        for index, file in enumerate(self._files):
            data: bytes | None = b"-"
            while data and not self._is_full:
                data = self._take(index, file.fileno())
            if data == b"" or how != "exit":
                file.close()
            else:
                held.append(file)
        if held:
            threading.Thread(target=_drop, args=(held,), daemon=True).start()

    @property
    def _is_full(self) -> bool:
        return sum(map(len, self.taken)) >= self._bytes_max

    def _take(self, index: int, number: int) -> bytes | None:
        """Returns what has arrived, b"" at the end of the stream, None if there is nothing now."""
        try:
            data = os.read(number, _READ_BYTES)
        except BlockingIOError:
            return None
        room = self._bytes_max - sum(map(len, self.taken))
        self.taken[index] += data[:room]
        return data


def _drop(files: list[Any]) -> None:
    for file in files:
        os.set_blocking(file.fileno(), True)
    poll = select.poll()
    by_number = {file.fileno(): file for file in files}
    for number in by_number:
        poll.register(number, select.POLLIN)
    while by_number:
        for number, _ in poll.poll():
            if not os.read(number, _READ_BYTES):
                poll.unregister(number)
                by_number.pop(number).close()


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(min(seconds * 1000, POLL_MILLISECONDS_MAX)) + 1


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _is_there(program: str, path: str) -> bool:
    return "/" in program or any(
        os.path.lexists(Path(directory, program)) for directory in path.split(":")
    )


def _not_started(code: int, text: str) -> Answer:
    return {"exit_code": code, "how": "exit", "stdout": 0}, text.encode()


# The operations on files. Paths are absolute; the kernel's own view of the sandbox decides.


def _cwd(*, body: bytes) -> Answer:  # noqa: ARG001
    return {"path": str(Path.cwd())}, b""


def _read(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    # O_NONBLOCK: the path may be a FIFO without a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        if about.st_size > BODY_BYTES_MAX:
            raise OSError(errno.EFBIG, f"it is larger than {BODY_BYTES_MAX} bytes")
        return {}, file.read(BODY_BYTES_MAX)


def _write(*, path: str, body: bytes) -> Answer:
    place = Path(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, "its parent is not a directory") from error
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o666), "wb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        file.truncate(0)
        file.write(body)
    return {}, b""


def _stat(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    return _entry(path), b""


def _list(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    return {"entries": [_entry(os.path.join(path, name)) for name in sorted(os.listdir(path))]}, b""  # noqa: PTH118, PTH208


def _entry(path: str) -> dict[str, Any]:
    place = Path(path)
    try:
        about = place.stat()
    except OSError:
        about = place.lstat()  # a link that leads nowhere is listed as it is
        if not stat.S_ISLNK(about.st_mode):
            raise
        return {"name": place.name, "path": path, "is_dir": False, "size": None}
    is_dir = stat.S_ISDIR(about.st_mode)
    size = None if is_dir else about.st_size
    return {"name": place.name, "path": path, "is_dir": is_dir, "size": size}


def _mkdir(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    Path(path).mkdir(parents=True, exist_ok=True)
    return {}, b""


def _remove(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    place = Path(path)
    is_link = place.is_symlink()
    here = Path.cwd()
    if not is_link and place.resolve() in (here, *here.parents):
        raise ValueError("the working directory and those above it cannot be removed")
    if not is_link and place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    return {}, b""


def _exists(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    return {"exists": Path(path).exists()}, b""


def _realpath(*, path: str, body: bytes) -> Answer:  # noqa: ARG001
    return {"path": os.path.realpath(path)}, b""


_OPERATIONS: dict[str, Callable[..., Answer]] = {
    "cwd": _cwd,
    "read": _read,
    "write": _write,
    "stat": _stat,
    "list": _list,
    "mkdir": _mkdir,
    "remove": _remove,
    "exists": _exists,
    "realpath": _realpath,
}
