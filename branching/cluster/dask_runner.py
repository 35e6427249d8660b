"""Attempts on a Dask cluster. Needs the extra `dask`.

    from branching.cluster import DaskRunner

    BestOfN(task, n=200, runner=DaskRunner("tcp://scheduler:8786"))(workspace)

An attempt is a task whose result has the reply and the layer, and stays at its worker. The parts
that are needed are read there by the worker's event loop: a task for it would wait for a free
thread, behind other attempts.

Dask computes a result that was lost with its worker again. A second run would have another result
than the one that was chosen, so a run sets an event, and a later one ends when it finds it set.
What this program puts goes to one worker of each node. A task that needs it asks the scheduler who
has it: so the base does not come to a node that has unpacked it, and comes once to the others. If
all workers that have it have died, the task asks this program, which puts it to the task's worker.

A short reply comes as an event, so nobody has to ask the worker for it.

The messages of attempts are events of the scheduler. Their topic is the client's id: the scheduler
keeps the last events of each topic, and only those of a client are dropped when it has gone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from branching.cluster.cluster_runner import ClusterRunner
from branching.cluster.engine import EngineError, Function, run_function
from branching.errors import ClusterError
from branching.fs import Branch, Workspace
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from distributed import Client, Future, Worker

    from branching.process import ResourceLimits


_RESULT_BYTES_MAX = 16 << 10
"""The scheduler keeps the last events in memory."""
_BUSY_SECONDS = 0.1
"""Time until a worker that sends to many others is asked again."""
_AGAIN_SECONDS = 60.0
"""Time that this program has to put a lost piece again, which has at most `CHUNK_BYTES`."""
_POLL_SECONDS = 0.25
"""Time between two looks for a piece that is put again."""
_ERROR_SECONDS_MAX = 10.0
"""Time that the error of a task, which is here, has to come from the client's event loop."""


class DaskRunner:
    """Runs the attempts of a pattern on a Dask cluster: the pattern's option `runner`.

    The same as `RayRunner`, but for these differences. A worker runs as many attempts at once as it
    has threads. An `evaluate` runs in a thread of the worker, and is not killed when its attempt is
    cancelled.

    Args:
        address: Address of the scheduler. Default: that of the client which this program uses, else
            a cluster that is started on this machine.
        limits: Resource limits of each attempt, unless the pattern has its own.
        exclude: Glob patterns of paths that do not travel, with everything below them.
        dask_options: More options of each task, as for `Client.submit`: `resources`, `workers`,
            `priority`.

    Raises:
        ImportError: Dask is not installed.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        limits: ResourceLimits | None = None,
        exclude: Sequence[str] = (),
        dask_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import distributed  # noqa: F401
        except ImportError as error:
            raise ImportError(
                'DaskRunner needs its extra: pip install ".[dask]" in the source tree'
            ) from error
        self._address = address
        self._limits = limits
        self._exclude = tuple(exclude)
        self._options = dict(dask_options or {})
        self._client: Client | None = None
        self._lock = threading.Lock()

    def open_runner(self, parent: Workspace | Branch, **options: Any) -> Runner:
        """Connects to the cluster and returns the runner of one call."""
        options["limits"] = options["limits"] or self._limits
        engine = _DaskEngine(self._connected(), self._options)
        return ClusterRunner(parent, engine=engine, exclude=self._exclude, **options)

    def _connected(self) -> Client:
        from distributed import Client, default_client

        with self._lock:
            if self._client is not None and self._client.status == "running":
                return self._client
            if self._address is None:
                try:
                    found: Client = default_client()
                    return found
                except ValueError:
                    pass  # there is none
            try:
                self._client = Client(self._address, set_as_default=False)
            except (OSError, ValueError) as error:  # OSError: also a timeout
                raise ClusterError(
                    f"cannot connect to the Dask cluster at {self._address or 'this machine'}: "
                    f"{error}; nothing was run"
                ) from error
            return self._client


class _DaskStore:
    """The object store in a worker, for one attempt."""

    def __init__(self, key: str, topic: str) -> None:
        from distributed import get_worker

        self._worker = get_worker()
        self._key = key
        self._topic = topic
        self.pieces: list[bytes] = []
        self.node = f"{socket.gethostname()}/{self._worker.address.rpartition(':')[2]}"

    def put(self, data: bytes) -> object:
        self.pieces.append(data)
        return self._key, len(self.pieces) - 1

    def pass_on(self, message: object) -> None:
        """Sends a message to the program, unless it is None."""
        if message is not None:
            event = self._key, self._worker.address, pickle.dumps(message)
            self._worker.log_event(self._topic, event)

    def get(self, reference: object) -> bytes:
        from distributed.utils import sync

        assert isinstance(reference, str)
        deadline = None
        while True:
            try:
                data = sync(self._worker.loop, self._fetch, reference)
            except Exception as error:  # Dask has no base class for what it raises
                if deadline is None:
                    deadline = time.monotonic() + _AGAIN_SECONDS
                    self.pass_on(_Lost(reference))
                elif time.monotonic() > deadline or self.is_cancelled(""):
                    raise EngineError(_error_text(error)) from error
                time.sleep(_POLL_SECONDS)
                continue
            assert isinstance(data, bytes)
            return data

    async def _fetch(self, key: str) -> object:
        """Returns what the program has put, from a worker that has it, of this node if possible."""
        from distributed.worker import get_data_from_worker

        worker = self._worker
        if key in worker.data:
            return worker.data[key]
        error: Exception = EngineError("the workers that had it have ended")
        holders = (await worker.scheduler.who_has(keys=[key])).get(key, ())
        for address in sorted(holders, key=lambda each: _host(each) != _host(worker.address)):
            try:
                while True:
                    reply: Any = await get_data_from_worker(
                        worker.rpc, [key], address, who=worker.address
                    )
                    if reply["status"] != "busy":
                        return reply["data"][key]
                    await asyncio.sleep(_BUSY_SECONDS)
            except Exception as failure:  # it has ended, or has lost the data
                error = failure
        raise error

    def is_cancelled(self, token: str) -> bool:  # noqa: ARG002  (the scheduler says it by the task)
        # The scheduler takes a task away when it is cancelled, and when its client has gone.
        task = self._worker.state.tasks.get(self._key)
        return task is None or task.state in ("cancelled", "released", "forgotten")


class _DaskEngine:
    def __init__(self, client: Client, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = options
        self._put: dict[str, Future[bytes]] = {}
        self._copies = tempfile.TemporaryFile(prefix="branching-pieces-")  # noqa: SIM115  (`close`)
        """Copies of what was put, which are needed if all workers with a piece die."""
        self._places: dict[str, tuple[int, int]] = {}
        """By key, the offset and the size of its copy."""
        self._tasks: dict[str, _Task] = {}
        self._inbox = _Inbox.opened(client)
        self._lock = threading.Lock()
        """Guards what follows against tasks that are submitted and cancelled at once."""
        self._by_token: dict[str, list[Future[Any]]] = {}
        self._cancelled: set[str] = set()
        self._prefix = f"branching-{secrets.token_hex(8)}"

    def put(self, data: bytes) -> object:
        try:
            workers = _one_of_each_node(self._client)
            (future,) = self._client.scatter([data], workers=workers, broadcast=True, hash=False)
        except Exception as error:  # TimeoutError if there is no worker, and what Dask raises
            raise ClusterError(
                f"the base could not be sent to the workers: {_error_text(error)}; nothing was run"
            ) from error
        self._put[future.key] = future
        with self._lock:
            self._places[future.key] = self._copies.tell(), len(data)
            self._copies.write(data)
            self._copies.flush()
        return future.key

    def _put_again(self, key: str, worker: str) -> None:
        """Puts a piece to a worker that has found it nowhere."""
        offset, size = self._places[key]
        # If it fails, the worker has died, or says what it did not find.
        with suppress(Exception):
            data = os.pread(self._copies.fileno(), size, offset)
            self._put.update(self._client.scatter({key: data}, workers=[worker], hash=False))

    def get(self, reference: object) -> bytes:
        assert isinstance(reference, tuple)
        key, number = reference
        data = self._result(key, 1)[number]
        assert isinstance(data, bytes)
        return data

    def pickle(self, value: object) -> bytes:
        import cloudpickle

        data: bytes = cloudpickle.dumps(value)
        return data

    def submit(
        self,
        function: Function,
        argument: object,
        *,
        needs: Sequence[object],  # noqa: ARG002  (the task asks for what is not on its node)
        token: str,
    ) -> object:
        key = f"{self._prefix}-{len(self._tasks)}"
        task = self._tasks[key] = self._inbox.tasks[key] = _Task()
        call = _Call(function, argument, key, self._client.id)
        task.future = self._client.submit(
            pickle.loads,  # a worker that cannot import what a message names ends
            pickle.dumps(call),
            key=key,
            pure=False,
            retries=0,
            **self._options,
        )
        with self._lock:
            self._by_token[token].append(task.future)
            if token in self._cancelled:
                task.future.cancel(force=True)
        task.future.add_done_callback(lambda _: task.messages.put(None))
        return key

    def receive(self, task: object, listener: Callable[[Any], None]) -> Any:
        assert isinstance(task, str)
        result = None
        try:
            while (message := self._tasks[task].messages.get()) is not None:
                found = pickle.loads(message)
                if isinstance(found, _Result):
                    result = found
                elif isinstance(found, _Lost):
                    self._put_again(found.key, self._tasks[task].worker)
                else:
                    listener(found)
        finally:
            del self._inbox.tasks[task]
        found = self._result(task, 0) if result is None else result.data
        return pickle.loads(found)

    def give_up(self, task: object) -> None:
        """A task that was cancelled is not waited for."""

    def new_token(self) -> str:
        token = secrets.token_hex(8)
        self._by_token[token] = []
        return token

    def cancel(self, token: str) -> None:
        with self._lock:
            self._cancelled.add(token)
            self._client.cancel(self._by_token[token], force=True)

    def close(self) -> None:
        from distributed import Event

        for key in self._tasks:
            self._inbox.tasks.pop(key, None)
            Event(key, client=self._client).clear()
        self._put.clear()
        self._copies.close()
        self._tasks.clear()
        self._inbox.close()

    def _result(self, key: str, part: int) -> Any:
        """Returns a part of the result of a task, which has ended."""
        from distributed import CancelledError

        try:
            task = self._tasks[key]
            if task.future.status != "finished":
                task.future.result(timeout=_ERROR_SECONDS_MAX)  # raises what it ended with
            found = self._client.run(_part_of_result, key, part, workers=[task.worker])
            return found[task.worker]
        except (Exception, CancelledError) as error:  # Dask has no base class for what it raises
            raise EngineError(_error_text(error)) from error


@dataclass(frozen=True)
class _Result:
    """The last message of a task, if what it returns is short."""

    data: bytes


@dataclass(frozen=True)
class _Lost:
    """A message of a task that has found no worker with a piece."""

    key: str


class _Task:
    """A task, as this program sees it."""

    future: Future[Any]
    worker = ""
    """Address of the worker that runs it."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        """None at the end."""


class _Inbox:
    """The tasks of a client that run, by key. They get their messages.

    Calls may share a client, and a client has one handler for a topic.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._users = 0
        self.tasks: dict[str, _Task] = {}

    @staticmethod
    def opened(client: Client) -> _Inbox:
        """Returns the inbox of a client, for one more call."""
        with _INBOXES_LOCK:
            inbox = _INBOXES.setdefault(client.id, _Inbox(client))
            inbox._users += 1
            if inbox._users == 1:
                client.subscribe_topic(client.id, inbox._on_event)
            return inbox

    def close(self) -> None:
        """Ends the subscription after the last call: the client may be closed then."""
        with _INBOXES_LOCK:
            self._users -= 1
            if self._users == 0:
                self._client.unsubscribe_topic(self._client.id)
                del _INBOXES[self._client.id]

    def _on_event(self, event: tuple[float, Any]) -> None:
        if isinstance(event[1], dict):
            return  # the scheduler's own, about the client
        key, worker, message = event[1]
        if (task := self.tasks.get(key)) is not None:
            task.worker = worker
            task.messages.put(message)


_INBOXES: dict[str, _Inbox] = {}
"""By id of the client."""
_INBOXES_LOCK = threading.Lock()


class _Call:
    """A call of `_run`, which is made when this is unpickled."""

    def __init__(self, *arguments: object) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[object, ...]:
        return _run, self._arguments


def _run(function: Function, argument: object, key: str, topic: str) -> tuple[bytes, list[bytes]]:
    """Returns what the function returns, and the pieces of its layer."""
    from distributed import Event, get_client

    has_run = Event(key, client=get_client())
    if has_run.is_set():
        raise EngineError("its worker has died; it is not repeated")
    has_run.set()
    store = _DaskStore(key, topic)
    returned = run_function(function, store, argument, store.pass_on)
    result = pickle.dumps(returned)
    if len(result) <= _RESULT_BYTES_MAX:
        store.pass_on(_Result(result))
    return result, store.pieces


def _one_of_each_node(client: Client) -> list[str] | None:
    """Returns the addresses of one worker of each machine; None if there is no worker."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return list({_host(address): address for address in workers}.values()) or None


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _error_text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if isinstance(error, EngineError):
        return str(error)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _part_of_result(key: str, part: int, dask_worker: Worker) -> object:
    result: Any = dask_worker.data[key]
    found: object = result[part]
    return found
