"""The bridge between threads and asyncio: the one place where they call each other.

    run_in_thread       awaits a blocking function in a thread of its own
    thread_future       a future that any thread may settle, for what a thread answers later
    QueueThread         a thread that calls functions in order
    call_soon           calls a function in an event loop, from any thread
    start_in_loop       starts a coroutine in an event loop, from any thread
    run_in_loop         waits for it, too

The threads are daemons, and no pool is used: the interpreter waits for the threads of a pool when
it exits, and one that hangs in a dead mount would keep it. `branching.mcp` runs on anyio, whose
cancellation is raised again at every await. So it waits in its own way
(`branching.mcp.worker_threads`), for a future of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio
    import queue
    import threading
    from concurrent import futures

WAITING_MAX = 64
"""How many calls of a person may wait for a thread that hangs."""

R = TypeVar("R")


class Settle(Generic[R]):
    """Settles a future of an event loop from any thread.

    Does nothing if the future is settled or cancelled, or the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[R]) -> None:
        self._loop = loop
        self._future = future

    def __call__(self, step: Callable[[], R]) -> None:
        """Calls `step`; its value or exception is that of the future."""
        try:
            value = step()
        except StopIteration as error:  # no future takes it: it ends what iterates
            raised = RuntimeError(f"StopIteration was raised: {error}")
            raised.__cause__ = error
            self.fail(raised)
        except BaseException as error:  # raised again where the future is awaited
            self.fail(error)
        else:
            self.set(value)

    def set(self, value: R) -> None:
        """Gives the future its value."""
        self._soon(lambda: self._future.set_result(value))

    def fail(self, error: BaseException) -> None:
        """Makes the future raise `error`."""
        self._soon(lambda: self._future.set_exception(error))

    def _soon(self, settle: Callable[[], None]) -> None:
        def step() -> None:
            if not self._future.done():
                settle()

        call_soon(self._loop, step)


def call_soon(
    loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object
) -> None:
    """Has an event loop call a function. Does not wait, and does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise


def start_in_loop(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, R]
) -> futures.Future[R]:
    """Starts a coroutine in the event loop of another thread. Does not wait."""
    import asyncio

    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def run_in_loop(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, R],
    *,
    seconds_max: float | None = None,
) -> R:
    """Runs a coroutine in the event loop of another thread, and returns its value.

    Raises:
        TimeoutError: It took longer than `seconds_max`, and was cancelled.
    """
    from concurrent import futures

    future = start_in_loop(loop, coroutine)
    try:
        return future.result(seconds_max)
    except futures.TimeoutError as error:  # not yet the built-in one in Python 3.10
        future.cancel()
        raise TimeoutError(f"the event loop did not answer within {seconds_max} s") from error


def thread_future() -> tuple[asyncio.Future[R], Settle[R]]:
    """Returns a future of the running event loop, and what settles it from any thread."""
    import asyncio

    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()
    return future, Settle(loop, future)


async def run_in_thread(
    step: Callable[[], R], *, on_cancel: Callable[[bool], None] | None = None
) -> R:
    """Runs `step` in a thread and returns its value.

    If the task is cancelled meanwhile, CancelledError is raised after the step has ended, so that a
    branch that is being created or committed is never abandoned.

    Args:
        step: The blocking function.
        on_cancel: Called at each cancellation, to end the step sooner. The argument is False for
            the first one.
    """
    import asyncio
    import contextvars
    import threading

    outcome: asyncio.Future[R]
    outcome, settle = thread_future()
    context = contextvars.copy_context()
    threading.Thread(
        target=settle, args=(lambda: context.run(step),), name="awaited", daemon=True
    ).start()
    cancelled: asyncio.CancelledError | None = None
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except asyncio.CancelledError as again:
            if on_cancel is not None:
                on_cancel(cancelled is not None)
            cancelled = again
    if cancelled is not None:
        outcome.exception()  # seen: the cancellation is what the caller asked for
        raise cancelled
    return outcome.result()


class QueueThread:
    """A thread that calls functions one after the other. It starts with the first one.

    It is a daemon, and nobody has to wait for it: a function that hangs in a dead mount does not
    keep the program from ending.
    """

    def __init__(self, name: str, waiting_max: int = 0) -> None:
        """Creates it.

        Args:
            name: The name of the thread.
            waiting_max: How many functions may wait for their turn. Default: any number.
        """
        import queue

        self._name = name
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue(waiting_max)
        self._thread: threading.Thread | None = None

    def put(self, function: Callable[[], object]) -> None:
        """Has the thread call a function, after all that was asked before.

        Raises:
            RuntimeError: Too many functions wait.
        """
        import queue
        import threading

        try:
            self._queue.put_nowait(function)
        except queue.Full:
            raise RuntimeError(
                f"{self._queue.qsize()} calls are queued already; try later"
            ) from None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    async def do(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        """Calls a function in the thread, and returns or raises what it does.

        If the task is cancelled meanwhile, the function is called all the same.

        Raises:
            RuntimeError: Too many functions wait.
        """
        future: asyncio.Future[R]
        future, settle = thread_future()
        self.put(lambda: settle(lambda: function(*args, **options)))
        return await future

    def close(self, seconds_max: float) -> None:
        """Waits until all functions were called, but no longer than `seconds_max`."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds_max)
            self._thread = None

    def _work(self) -> None:
        while (function := self._queue.get()) is not None:
            function()
