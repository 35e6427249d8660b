"""Our side of the sandbox of a branch: started at its first use, ended by `close`.

All calls are coroutines of one event loop or of several. One thread writes the requests and
another reads the replies. Only these two wait on the pipes, and neither holds a lock meanwhile:
the server can always answer, so it always reads on, so no event loop waits for it. When the server
dies, whatever the reason, who waits for it gets SandboxGone, and so does who comes later:
what ran in it is dead, and a new one would not know of it.
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
from branching._threads import run_in_thread
from branching.agent.sandbox.wire import BadFrame, Frame, encode_frame, read_frame, write_frame
from branching.errors import BranchingError, ProcessBranchError
from branching.process import BranchContext, Isolation, ResourceLimits

OUTPUT_BYTES_MAX = 10 << 20
"""Of one command, both streams together."""
REASON_SECONDS_MAX = 1.0
"""How long a server that does not answer any more may take to end."""
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
        self._waiting: dict[int, Callable[[Reply | Exception], None]] = {}
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
        """Runs a program in the branch's directory until it ends, its input empty.

        Cancelled, or after `timeout` seconds, its process group is killed; what it put into a
        session of its own stays, until `close`. Raises SandboxGone.
        """
        facts, body = await self.call(
            "run", argv=list(argv), env=dict(env or {}), timeout=timeout, output_max=output_max
        )
        cut = facts["stdout"]
        return Completed(
            exit_code=facts["exit_code"], how=facts["how"], stdout=body[:cut], stderr=body[cut:]
        )

    async def call(self, op: str, body: bytes = b"", **facts: object) -> Reply:
        """Asks the server for one operation.

        Raises what it answered, OSError or ValueError; SandboxGone when it is there no more.
        """
        if self._context is None:
            await run_in_thread(self._start)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Reply] = loop.create_future()
        number = next(self._numbers)

        def tell(reply: Reply | Exception) -> None:
            try:
                loop.call_soon_threadsafe(_settle, answer, reply)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        with self._lock:
            if self._is_closed:
                raise self._gone()
            self._waiting[number] = tell
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
                    tell = self._waiting.pop(frame[0].get("id", 0), None)
                if tell is not None:
                    tell(frame)
        except BadFrame:
            pass  # somebody in there has taken it over: it is as good as gone
        finally:
            os.close(replies)
            reason = self._reason()
            with self._lock:
                self._is_closed = True
                self._ended_by = reason
                waiting, self._waiting = self._waiting, {}
            for tell in waiting.values():
                tell(self._gone())

    def _reason(self) -> str:
        """Returns why the server has ended; "" if it was told to, or that cannot be said."""
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
            f"the sandbox of {self.directory} has ended{why}, and what ran in it is dead; its "
            "files are as they were left",
            path=str(self.directory),
        )


def _server(requests: FileIO, replies: FileIO) -> Callable[[Path], object]:
    """Returns the function that runs in the sandbox. The pipes that it names are passed on."""

    def target(_: Path) -> None:
        from branching.agent.sandbox.server import serve

        serve(requests.fileno(), replies.fileno())

    return target


def _settle(answer: asyncio.Future[Reply], reply: Reply | Exception) -> None:
    if answer.done():
        return
    if isinstance(reply, Exception):
        answer.set_exception(reply)
    else:
        answer.set_result(reply)
