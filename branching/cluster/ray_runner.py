"""Attempts on a Ray cluster. Needs the extra `ray`.

    from branching.cluster import RayRunner

    BestOfN(task, n=200, runner=RayRunner(address="10.0.0.1:6379"))(workspace)

Tasks are never repeated by Ray (`max_retries=0`): a second run would have another result than the
one that was chosen. A layer is owned by the worker process that made it, and is lost with it.

Attempts are not cancelled by `ray.cancel`: in Ray 2.60 it ends this program ("Check failed") if the
task finishes at the same time. A key in Ray's store of keys and values says that they may run.
"""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from branching.cluster.cluster_runner import ClusterRunner
from branching.cluster.engine import EngineError, Function
from branching.errors import ClusterError
from branching.fs import Branch, Workspace
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from branching.process import ResourceLimits


_log = logging.getLogger("branching")
_KEYS = "branching"
"""Namespace of the keys: one for the attempts of a call that have not been cancelled."""


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
                raise ClusterError(
                    f"cannot connect to the Ray cluster at {self._address or 'this machine'}: "
                    f"{error}; nothing was run"
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

        # In a list it is not resolved when it is an argument.
        return [ray.put(data)]

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
        return self._run.remote(function, argument).future()

    def receive(self, task: object) -> Iterator[Any]:
        assert isinstance(task, Future)
        with _ray_errors():
            yield from task.result()

    def give_up(self, task: object) -> None:
        assert isinstance(task, Future)
        task.cancel()

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


def _run_in_store(function: Function, argument: object) -> list[object]:
    # All at the end: waiting for a future can be given up, for a streaming generator it cannot.
    return list(function(_RayStore(), argument))


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
