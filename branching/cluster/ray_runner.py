"""Attempts on a Ray cluster. Needs the extra `ray`.

    from branching.cluster import RayRunner

    BestOfN(task, n=200, runner=RayRunner(address="10.0.0.1:6379"))(workspace)

Tasks are never repeated by Ray (`max_retries=0`): a second run would have another result than the
one that was chosen. A layer is owned by the worker process that made it, and is lost with it.

Attempts are not cancelled by `ray.cancel`: in Ray 2.60 it ends this program ("Check failed") if the
task finishes at the same time. A key in Ray's store of keys and values says that they may run.

Messages of attempts come through that store, too. An attempt has one key. It writes messages there
when this program has read and deleted the last ones, so the store never has much. Messages that
were not read come with the result, as do all of an attempt that is shorter than the time between
two looks. So Ray keeps no process or connection for them.
"""

from __future__ import annotations

import logging
import pickle
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from branching.cluster.cluster_runner import ClusterRunner
from branching.cluster.engine import EngineError, Function, run_function
from branching.errors import ClusterError
from branching.fs import Branch, Workspace
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from branching.process import ResourceLimits


_log = logging.getLogger("branching")
_KEYS = "branching"
"""Namespace of the keys: one for the attempts of a call that have not been cancelled, and one for
the messages of each."""
_POLL_SECONDS = 0.25
"""Time between two looks for messages."""


class RayRunner:
    """Runs the attempts of a pattern on a Ray cluster: the pattern's option `runner`.

    The workspace is packed once for a call and unpacked once by each node. An attempt answers with
    its result; what it changed stays at its node until it has won. The winner's changes are then
    committed here, under the same conflict rules as those of a local attempt.

    Functions always run in a separate process, as with `isolate_processes`.

    Args:
        address: Address of the cluster, as for `ray.init`, but not one of `ray://`. Default: the
            cluster that this program is connected to, else RAY_ADDRESS, else one that is started on
            this machine.
        num_cpus: Processors that an attempt takes: how many run at once on a node.
        limits: Resource limits of each attempt, unless the pattern has its own.
        exclude: Glob patterns of paths that do not travel, with everything below them.
        ray_options: More options of each task, as for `ray.remote`: `resources`,
            `scheduling_strategy`, `runtime_env`.

    Raises:
        ImportError: Ray is not installed.
        ValueError: The address is one for Ray clients.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float = 1,
        limits: ResourceLimits | None = None,
        exclude: Sequence[str] = (),
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ImportError(
                'RayRunner needs its extra: pip install ".[ray]" in the source tree'
            ) from error
        if address is not None and address.startswith("ray://"):
            raise ValueError(
                f"{address} is for Ray clients, which get no results while attempts run: give the "
                "address HOST:PORT of the cluster, on a machine that is a node of it"
            )
        self._address = address
        self._limits = limits
        self._exclude = tuple(exclude)
        self._options = {"num_cpus": num_cpus, **(ray_options or {}), "max_retries": 0}

    def open_runner(self, parent: Workspace | Branch, **options: Any) -> Runner:
        """Connects to the cluster and returns the runner of one call."""
        import ray

        if not ray.is_initialized():
            try:
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
            except Exception as error:  # Ray has no base class for what it raises here
                hint = "a cluster that was started with a token needs RAY_AUTH_MODE=token"
                if "Version mismatch" in str(error):
                    hint = "run the program with the cluster's versions of Python and Ray"
                raise ClusterError(
                    f"cannot connect to the Ray cluster at {self._address or 'this machine'}: "
                    f"{error}; nothing was run",
                    hint=hint,
                ) from error
        options["limits"] = options["limits"] or self._limits
        engine = _RayEngine(self._options)
        return ClusterRunner(parent, engine=engine, exclude=self._exclude, **options)


class _RayStore:
    """Ray's object store, from any process of the cluster."""

    def __init__(self) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        self.node = f"{socket.gethostname()}/{node[:8]}"

    def put(self, data: bytes) -> object:
        import ray

        with _ray_errors():  # a full disk, for instance
            return [ray.put(data)]  # in a list it is not resolved when it is an argument

    def get(self, reference: object) -> bytes:
        import ray

        with _ray_errors():
            data = ray.get(reference[0])  # type: ignore[index]
        assert isinstance(data, bytes)
        return data

    def is_cancelled(self, token: str) -> bool:
        from ray.experimental.internal_kv import _internal_kv_exists

        try:
            return not _internal_kv_exists(token, namespace=_KEYS)
        except Exception:  # the head of the cluster restarts, for instance
            return False


class _RayEngine(_RayStore):
    def __init__(self, options: Mapping[str, Any]) -> None:
        import ray

        super().__init__()
        self._run = ray.remote(**options)(_run_in_store)
        self._topic = f"{uuid.uuid4().hex}/"
        self._messages: dict[str, queue.SimpleQueue[tuple[int, list[Any]] | None]] = {}
        """By key, the messages that were read. Only of tasks that have not ended."""
        self._closed = threading.Event()
        self._reader = threading.Thread(
            target=self._read_messages, name="messages of Ray", daemon=True
        )
        self._lock = threading.Lock()
        """Guards the start of the reader, by the first task."""

    def pickle(self, value: object) -> bytes:
        from ray import cloudpickle

        data: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call,unused-ignore]
        return data

    def submit(
        self,
        function: Function,
        argument: object,
        *,
        needs: Sequence[object],  # noqa: ARG002  (Ray fetches what is asked for)
        token: str,  # noqa: ARG002  (the task asks for it)
    ) -> object:
        with self._lock:
            if self._reader.ident is None:
                self._reader.start()
        key = f"{self._topic}{uuid.uuid4().hex[:8]}"
        messages: queue.SimpleQueue[tuple[int, list[Any]] | None] = queue.SimpleQueue()
        self._messages[key] = messages
        future = self._run.remote(function, argument, key).future()
        future.add_done_callback(lambda _: messages.put(None))
        return _Task(key, future, messages)

    def receive(self, task: object, listener: Callable[[Any], None]) -> Any:
        assert isinstance(task, _Task)
        received = 0
        try:
            while (read := task.messages.get()) is not None:
                received = _pass_on(listener, received, *read)
            with _ray_errors():
                first, unread, result = task.future.result()
        finally:
            del self._messages[task.key]
        _pass_on(listener, received, first, unread)
        return result

    def _read_messages(self) -> None:
        from ray.experimental import internal_kv as store

        while not self._closed.wait(_POLL_SECONDS):
            # An error is that of a head that restarts, for instance. The messages come later.
            with suppress(Exception):
                for key in store._internal_kv_list(self._topic, namespace=_KEYS):
                    data = store._internal_kv_get(key, namespace=_KEYS)
                    messages = self._messages.get(key.decode())
                    if data and messages is not None:
                        messages.put(pickle.loads(data))
                        store._internal_kv_del(key, namespace=_KEYS)

    def give_up(self, task: object) -> None:
        assert isinstance(task, _Task)
        task.future.cancel()

    def new_token(self) -> str:
        from ray.experimental.internal_kv import _internal_kv_put

        token = uuid.uuid4().hex
        _internal_kv_put(token, b"", namespace=_KEYS)
        return token

    def cancel(self, token: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        try:
            _internal_kv_del(token, namespace=_KEYS)
        except Exception as error:
            _log.warning("the head of the cluster cannot end attempts: %s", error)

    def close(self) -> None:
        """The references go with this object and with the runner's."""
        from ray.experimental.internal_kv import _internal_kv_del

        self._closed.set()
        with suppress(Exception):  # of a task that was killed
            _internal_kv_del(self._topic, del_by_prefix=True, namespace=_KEYS)


@dataclass(frozen=True)
class _Task:
    """A task, as this program sees it."""

    key: str
    """Of its messages."""
    future: Future[tuple[int, list[Any], Any]]
    messages: queue.SimpleQueue[tuple[int, list[Any]] | None]
    """None at the end."""


class _Outbox:
    """The messages of a task, on its node, that the caller may not have read."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._offered = 0
        """How many of them are in the store."""
        self._is_broken = False
        self._begun = time.monotonic()
        self.first = 0
        """Number of the first one, from 0."""
        self.messages: list[object] = []

    def add(self, message: object) -> None:
        """Adds a message, unless it is None, and writes them to the store if it is their turn."""
        if message is not None:
            self.messages.append(message)
        try:
            if not self._is_broken and time.monotonic() - self._begun >= _POLL_SECONDS:
                self._offer()
        except Exception:  # the head of the cluster restarts, for instance
            # They may have been written. The caller leaves out what it has had.
            self._is_broken = True

    def _offer(self) -> None:
        """Writes them to the store, if the caller has read and deleted the last ones."""
        from ray.experimental.internal_kv import _internal_kv_exists, _internal_kv_put

        if self._offered and not _internal_kv_exists(self._key, namespace=_KEYS):
            del self.messages[: self._offered]
            self.first += self._offered
            self._offered = 0
        if self.messages and not self._offered:
            self._offered = len(self.messages)
            data = pickle.dumps((self.first, self.messages))
            _internal_kv_put(self._key, data, namespace=_KEYS)

    def close(self) -> None:
        """Deletes them from the store."""
        from ray.experimental.internal_kv import _internal_kv_del

        if self._offered:
            with suppress(Exception):
                _internal_kv_del(self._key, namespace=_KEYS)


def _run_in_store(
    function: Function, argument: object, key: str
) -> tuple[int, list[object], object]:
    """Returns the number of the first message that may be unread, these messages, the result."""
    outbox = _Outbox(key)
    result = run_function(function, _RayStore(), argument, outbox.add)
    outbox.close()
    return outbox.first, outbox.messages, result


def _pass_on(
    listener: Callable[[Any], None], received: int, first: int, messages: Sequence[Any]
) -> int:
    """Passes on the messages that were not received yet, and returns how many have been."""
    for message in messages[received - first :]:
        listener(message)
    return first + len(messages)


@contextmanager
def _ray_errors() -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, CancelledError) as error:
        cause = getattr(error, "cause", None)
        said = str(cause or error).strip().splitlines()
        name = type(cause or error).__name__
        raise EngineError(f"{name}: {said[0]}" if said else name) from error
