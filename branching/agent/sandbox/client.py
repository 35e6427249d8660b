"""The client of a branch's sandbox, which starts at its first use and ends at `close`.

Calls are coroutines of one or several event loops. One thread writes the requests and another reads
the replies. Only these threads wait on the pipes, and they hold no lock meanwhile. So the server
can always reply and read on, and no event loop is blocked. When the server has died, all waiting
and later calls raise SandboxGone: its processes are dead, and a new server would not have them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from branching._standard_streams import open_closed
from branching._threads import Settle, run_in_thread, thread_future
from branching.agent.sandbox.wire import BadFrame, Frame, encode_frame, read_frame, write_frame
from branching.errors import BranchingError, ProcessBranchError
from branching.process import BranchContext, Isolation, ResourceLimits

OUTPUT_BYTES_MAX = 10 << 20
"""Of one command, both streams together."""
REASON_SECONDS_MAX = 1.0
"""How long a server that does not answer any more may take to end."""
_SERVER = "branching.agent.sandbox.server"
Reply = tuple[dict[str, Any], bytes]


class SandboxGone(ProcessBranchError):
    """The branch's sandbox has ended, and all that ran in it. Its files are as they were left."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A command that has ended."""

    exit_code: int
    """As a shell reports it."""
    how: Literal["exit", "timeout", "output"]
    """What ended it: itself, its time, or that it printed too much."""
    stdout: bytes
    stderr: bytes


class BranchSandbox:
    """The sandbox of one directory. Made without doing anything; the first call starts it."""

    def __init__(
        self,
        directory: Path,
        *,
        seen_at: Path | None = None,
        environment: Mapping[str, str] | None = None,
        network: bool = True,
        hide: Sequence[str] = (),
        limits: ResourceLimits | None = None,
        isolation: Isolation = "sandbox",
    ) -> None:
        self.directory = directory
        self.seen_at = seen_at or directory
        """The path at which commands see the directory."""
        self._options: dict[str, Any] = {
            "seen_at": seen_at,
            "env": dict(environment or {}),
            "network": network,
            "hide": hide,
            "limits": limits,
            "isolation": isolation,
        }
        self._numbers = itertools.count(1)
        self._starting = threading.Lock()  # held while it is started or closed
        self._lock = threading.Lock()  # guards all below
        self._waiting: dict[int, Settle[Reply]] = {}
        self._context: BranchContext | None = None
        self._is_closed = False
        self._ended_by = ""
        """Why it ended, if that was not by `close`."""
        self._outbox: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        output_max: int = OUTPUT_BYTES_MAX,
    ) -> Completed:
        """Runs a program with empty input in the branch's directory until it ends.

        After a cancellation or `timeout` seconds, its process group is killed. Processes in another
        session run until `close`.

        Raises:
            SandboxGone: The server has died.
        """
        facts, body = await self.call(
            "run", argv=list(argv), env=dict(env or {}), timeout=timeout, output_max=output_max
        )
        cut = facts["stdout"]
        return Completed(
            exit_code=facts["exit_code"], how=facts["how"], stdout=body[:cut], stderr=body[cut:]
        )

    async def call(self, op: str, body: bytes = b"", **facts: object) -> Reply:
        """Sends one request to the server and returns its reply.

        Raises:
            OSError: The operation failed.
            ValueError: The request is invalid.
            SandboxGone: The server has died.
        """
        if self._context is None:
            await run_in_thread(self._start)
        answer: asyncio.Future[Reply]
        answer, settle = thread_future()
        number = next(self._numbers)
        with self._lock:
            if self._is_closed:
                raise self._gone()
            self._waiting[number] = settle
        try:
            self._send({"id": number, "op": op, **facts}, body)
            reply, data = await answer
        except asyncio.CancelledError:
            self._send({"op": "cancel", "which": number})
            raise
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if "errno" in reply:
            raise OSError(int(reply["errno"]), str(reply["error"]), facts.get("path"))
        if "invalid" in reply:
            raise ValueError(str(reply["invalid"]))
        return reply, data

    def close(self) -> None:
        """Kills all that runs in it, and returns when that is dead. May be called again."""
        with self._starting:
            self._close()

    def _start(self) -> None:
        with self._starting:
            if self._is_closed:
                raise self._gone()
            if self._context is not None:
                return
            open_closed()
            requests, our_requests = os.pipe2(os.O_CLOEXEC)
            our_replies, replies = os.pipe2(os.O_CLOEXEC)
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            try:
                context = BranchContext(
                    _server(
                        FileIO(requests, "rb", closefd=False),
                        FileIO(replies, "wb", closefd=False),
                    ),
                    self.directory,
                    stdout=nothing,
                    stderr=nothing,
                    preload=[_SERVER],
                    **self._options,
                )
                context.__enter__()
            except BaseException:
                os.close(our_requests)
                os.close(our_replies)
                raise
            finally:
                for descriptor in (requests, replies, nothing):
                    os.close(descriptor)
            with self._lock:
                self._context = context
            for work, pipe in (
                (self._write_requests, our_requests),
                (self._read_replies, our_replies),
            ):
                thread = threading.Thread(
                    target=work, args=(pipe,), name="branch sandbox", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            context, self._context = self._context, None
        self._outbox.put(None)
        if context is not None:
            context.kill()
            context.__exit__(None, None, None)
        while self._threads:
            self._threads.pop().join()

    def _send(self, facts: dict[str, Any], body: bytes = b"") -> None:
        """Queues a request for the thread that writes; never waits. ValueError if too long."""
        try:
            self._outbox.put(encode_frame(facts, body))
        except BadFrame as error:
            raise ValueError(f"the request is too long to be sent: {error}") from error

    def _write_requests(self, requests: int) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                write_frame(requests, frame)
        except BrokenPipeError:
            pass  # the server has ended: the thread that reads reports it to the callers
        finally:
            os.close(requests)

    def _read_replies(self, replies: int) -> None:
        try:
            while (frame := read_frame(replies)) is not None:
                with self._lock:
                    settle = self._waiting.pop(frame[0].get("id", 0), None)
                if settle is not None:
                    settle.set(frame)
        except BadFrame:
            pass  # invalid data: treated as a server that has died
        finally:
            os.close(replies)
            reason = self._reason()
            with self._lock:
                self._is_closed = True
                self._ended_by = reason
                waiting, self._waiting = self._waiting, {}
            for settle in waiting.values():
                settle.fail(self._gone())

    def _reason(self) -> str:
        """Returns why the server has ended, "" after `close` or if it is unknown."""
        with self._lock:
            context = None if self._is_closed else self._context
        if context is None:
            return ""
        try:
            context.wait(REASON_SECONDS_MAX)
        except TimeoutError:
            return ""
        except ProcessBranchError as error:
            return error.message
        return ""

    def _gone(self) -> BranchingError:
        why = f" ({self._ended_by})" if self._ended_by else ""
        return SandboxGone(
            f"the sandbox of {self.directory} has ended{why}, and its processes were killed; its "
            "files remain as they were",
            path=str(self.directory),
        )


def _server(requests: FileIO, replies: FileIO) -> Callable[[Path], object]:
    """Returns the function that runs in the sandbox. The pipes that it names are passed on."""

    def target(_: Path) -> None:
        from branching.agent.sandbox.server import serve

        serve(requests.fileno(), replies.fileno())

    return target
