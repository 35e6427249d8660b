"""Attempts on a cluster: what one costs, what travels, and what 10,000 of them wait for.

    python -m benchmarks.cluster measure --runner ray --address HOST:PORT -n 200
    python -m benchmarks.cluster simulate -n 10000 --nodes 100 --slots 4

`measure` runs trivial attempts on a cluster that is there already. It counts what this program
stores and fetches, which is what crosses the network for the base and the layers; the messages of
the engine itself are not in it. `simulate` plays a call with the costs that `measure` prints.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BASE_FILES = 1000
BASE_FILE_BYTES = 3000
RESULT_BYTES = 100_000


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a call is made of. Seconds of a processor, bytes, bytes a second."""

    driver_seconds: float = 0.004
    """Of the calling program, for each attempt: it is submitted, and its reply read."""
    attempt_seconds: float = 0.08
    """Of a slot of a node, for each attempt: open, fork, sandbox, export."""
    work_seconds: float = 0.0
    """Of the command itself."""
    base_bytes: float = 30e6
    unpack_seconds: float = 0.7
    network_bytes_per_second: float = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulated call."""

    seconds: float
    driver_busy: float
    """Share of the time in which the calling program is busy."""
    slots_busy: float
    """Share of the time in which the slots of the nodes are busy, on average."""
    bottleneck: str


def simulate(costs: Costs, *, attempts: int, nodes: int, slots: int) -> Outcome:
    """Plays a call: the calling program serves one attempt at a time, a slot runs one at a time.

    Each node fetches the base from the calling program's machine, one after the other, before it
    runs its first attempt.
    """
    transfer = costs.base_bytes / costs.network_bytes_per_second
    running = costs.attempt_seconds + costs.work_seconds
    free = [
        (node * transfer + transfer + costs.unpack_seconds, node)
        for node in range(nodes)
        for _ in range(slots)
    ]
    heapq.heapify(free)
    submitted = ended = 0.0
    half = costs.driver_seconds / 2  # before an attempt, and after it
    replies: list[float] = []
    for _ in range(attempts):
        submitted += half
        at, node = heapq.heappop(free)
        end = max(at, submitted) + running
        replies.append(end)
        heapq.heappush(free, (end, node))
    # The program reads replies when it does not submit.
    driver = submitted
    for reply in sorted(replies):
        driver = max(driver, reply) + half
        ended = driver
    parts = {
        "the calling program": attempts * costs.driver_seconds,
        "the slots of the nodes": attempts * running / (nodes * slots),
        "the base's way to the nodes": nodes * transfer + costs.unpack_seconds,
    }
    return Outcome(
        seconds=ended,
        driver_busy=min(1.0, parts["the calling program"] / ended),
        slots_busy=min(1.0, parts["the slots of the nodes"] / ended),
        bottleneck=max(parts, key=lambda name: parts[name]),
    )


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts the bytes that engines of this program store and fetch."""
    from branching.cluster import cluster_runner, engine

    sizes = {"stored": 0, "fetched": 0}
    put_file, fetch_file = engine.put_file, engine.fetch_file

    class Counting:
        def __init__(self, store: Any) -> None:
            self._store = store

        def put(self, data: bytes) -> object:
            sizes["stored"] += len(data)
            return self._store.put(data)

        def get(self, reference: object) -> bytes:
            data: bytes = self._store.get(reference)
            sizes["fetched"] += len(data)
            return data

    def put(store: Any, file: Any) -> list[object]:
        return put_file(Counting(store), file)  # type: ignore[arg-type]

    def fetch(store: Any, references: Any, file: Any) -> None:
        fetch_file(Counting(store), references, file)  # type: ignore[arg-type]

    cluster_runner.put_file, cluster_runner.fetch_file = put, fetch  # type: ignore[attr-defined]
    try:
        yield sizes
    finally:
        cluster_runner.put_file, cluster_runner.fetch_file = put_file, fetch_file  # type: ignore[attr-defined]


def measure(
    runner: Any,
    *,
    attempts: int,
    counting: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, object]:
    """Runs trivial attempts, twice: the first call also brings the base to the nodes.

    Each call is made in a `counting(NAME)`.
    """
    from branching import BestOfN, Workspace
    from branching.patterns.command_candidate import Program, shell

    figures: dict[str, object] = {"attempts": attempts}
    with tempfile.TemporaryDirectory(prefix="branching-bench-") as place, counted() as sizes:
        base = Path(place)
        for number in range(BASE_FILES):
            (base / f"file-{number}").write_bytes(b"%d" % number * (BASE_FILE_BYTES // 4))
        with Workspace.open(base) as space:
            text = f"head -c {RESULT_BYTES} /dev/urandom > made"
            task = Program(shell(text), workspace=space.seen_at, owner=None, score=True)
            for name in ("first", "second"):
                began, busy = time.monotonic(), time.process_time()
                with counting(f"{name}_call"):
                    outcome = BestOfN(task, attempts, runner=runner, commit=False)(space)
                failures = [each.exception for each in outcome.all_results if not each.success]
                assert not failures, failures
                if outcome.branch is not None:
                    outcome.branch.abort()
                figures[f"{name}_ms_each"] = round(1e3 * (time.monotonic() - began) / attempts, 1)
                figures["driver_ms_each"] = round(1e3 * (time.process_time() - busy) / attempts, 1)
        figures["by_node"] = Counter(each.node for each in outcome.all_results)
        figures |= sizes
    return figures


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster")
    parser.add_argument("what", choices=["measure", "simulate"])
    parser.add_argument("-n", type=int, default=200, help="attempts")
    parser.add_argument("--runner", choices=["ray", "dask"], default="ray")
    parser.add_argument("--address")
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--driver-ms", type=float, default=1e3 * Costs.driver_seconds)
    parser.add_argument("--attempt-ms", type=float, default=1e3 * Costs.attempt_seconds)
    parser.add_argument("--work-ms", type=float, default=0.0)
    options = parser.parse_args()
    if options.what == "measure":
        from branching.cluster import DaskRunner, RayRunner

        chosen = RayRunner if options.runner == "ray" else DaskRunner
        print(json.dumps(measure(chosen(options.address), attempts=options.n)))
        return
    costs = Costs(
        driver_seconds=options.driver_ms / 1e3,
        attempt_seconds=options.attempt_ms / 1e3,
        work_seconds=options.work_ms / 1e3,
    )
    outcome = simulate(costs, attempts=options.n, nodes=options.nodes, slots=options.slots)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
