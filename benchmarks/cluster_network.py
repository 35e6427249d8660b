"""A cluster of three nodes in network namespaces: what travels, and what is left on the nodes.

    python -m benchmarks.cluster_network --runner ray -n 200

Needs root. Prints one JSON document. Each node has its own network, process and mount namespace,
its own /tmp, /run and /dev/shm, one processor, and a link to the bridge of the calling program. The
kernel counts the bytes of the links: Ethernet, IP and TCP headers, acknowledgements, and all
messages of the engine. Two more figures say which part of them is the engine's: the bytes of a
cluster without work, and of as many empty tasks.

Everything ends with this program.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.cluster import measure

NODES = 3
HEAD = "10.77.0.1"
IDLE_SECONDS = 5.0
LEFT_SECONDS_MAX = 60.0
_NAP_SECONDS = 0.01
NAMESPACES = ["-n", "-m", "-p", "--fork", "--kill-child", "--mount-proc"]
NODE = 'for each in /tmp /run /dev/shm; do mount -t tmpfs none $each || exit; done; read go && "$@"'
PYTHON = [sys.executable, "-m"]
RAY = [*PYTHON, "ray.scripts.scripts", "start", "--block", "--object-store-memory", "200000000"]
HEAD_WORDS = {
    "ray": [*RAY, "--head", "--include-dashboard=false", "--node-ip-address"],
    "dask": [*PYTHON, "distributed.cli.dask_scheduler", "--no-dashboard", "--port=6379", "--host"],
}
NODE_WORDS = {
    "ray": [*RAY, "--num-cpus=1", f"--address={HEAD}:6379", "--node-ip-address"],
    "dask": [
        *[*PYTHON, "distributed.cli.dask_worker", f"tcp://{HEAD}:6379", "--no-dashboard"],
        *["--nthreads=1", "--host"],
    ],
}


class Cluster:
    """The processes of a cluster, and the links to its nodes."""

    def __init__(self, engine: str, place: Path, *, head_processors: int) -> None:
        self.engine = engine
        self._head_processors = head_processors
        self.place = place
        self.address = f"{HEAD}:6379" if engine == "ray" else f"tcp://{HEAD}:6379"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.head: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the head in this network namespace, and each node in one of its own."""
        _ip("link add bridge type bridge", "link set bridge up", "link set lo up")
        _ip(f"addr add {HEAD}/24 dev bridge", "route add default via 10.77.0.254")
        words = [*HEAD_WORDS[self.engine], HEAD]
        if self.engine == "ray":
            words.append(f"--num-cpus={self._head_processors}")
        self.head = self._started(words, "head")
        for number in range(NODES):
            address = f"10.77.0.{number + 2}"
            words = ["unshare", *NAMESPACES, "sh", "-c", NODE, "sh"]
            words += [*NODE_WORDS[self.engine], address]
            node = self._started(words, f"node-{number}")
            own = Path(f"/proc/{node.pid}/ns/net")
            while own.readlink() == Path("/proc/self/ns/net").readlink():
                time.sleep(_NAP_SECONDS)
            _ip(f"link add node{number} type veth peer name eth0 netns {node.pid}")
            _ip(f"link set node{number} master bridge up")
            for line in (
                "link set lo up",
                f"addr add {address}/24 dev eth0",
                "link set eth0 up",
                "route add default via 10.77.0.254",
            ):
                subprocess.run(["nsenter", f"--net={own}", "ip", *line.split()], check=True)
            assert node.stdin is not None
            node.stdin.write(b"go\n")
            node.stdin.close()
            self.nodes.append(node)

    def _started(self, words: list[str], name: str) -> subprocess.Popen[bytes]:
        own = {"BRANCHING_CACHE": str(self.place / name), "RAY_DISABLE_USAGE_STATS": "1"}
        own["RAY_AUTH_MODE"] = "disabled"
        with (self.place / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | own
            )

    def transferred(self) -> tuple[list[int], list[int]]:
        """Returns the bytes of each link so far: to the node, and from it."""
        shown = subprocess.run(["ip", "-j", "-s", "link"], check=True, capture_output=True).stdout
        links = {each["ifname"]: each["stats64"] for each in json.loads(shown)}
        found = [links[f"node{number}"] for number in range(NODES)]
        return [each["tx"]["bytes"] for each in found], [each["rx"]["bytes"] for each in found]

    @contextmanager
    def counting(self, figures: dict[str, Any], name: str) -> Iterator[None]:
        """Notes the bytes of each link during the block."""
        began, before = time.monotonic(), self.transferred()
        yield
        after = self.transferred()
        to, back = (
            [one - other for one, other in zip(*pair, strict=True)]
            for pair in zip(after, before, strict=True)
        )
        seconds = round(time.monotonic() - began, 2)
        figures[name] = {"to_each_node": to, "from_each_node": back, "seconds": seconds}

    def attempts(self) -> list[int]:
        """Returns the processes of attempts on the nodes."""
        mark = b"BRANCHING_WORKSPACE=" + os.fsencode(self.place)
        return [pid for pid, _, environment in _processes() if mark in environment]

    def left(self) -> list[str]:
        """Returns what attempts and bases have on the nodes: processes and mounts."""
        found = [f"process {pid}" for pid in self.attempts()]
        cache = os.fsencode(self.place / "node-")
        found += [f"process {pid}" for pid, words, _ in _processes() if cache in words]
        for node in self.nodes:
            (child,) = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
            mounts = Path(f"/proc/{child}/mountinfo").read_bytes()
            found += [line.decode() for line in mounts.splitlines() if cache in line]
        return found


def _ip(*lines: str) -> None:
    for line in lines:
        subprocess.run(["ip", *line.split()], check=True)


def _processes() -> Iterator[tuple[int, bytes, bytes]]:
    for each in Path("/proc").glob("[0-9]*"):
        try:
            yield int(each.name), (each / "cmdline").read_bytes(), (each / "environ").read_bytes()
        except OSError:
            pass  # it has ended


def _wait_until(is_so: Callable[[], object]) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > LEFT_SECONDS_MAX:
            raise TimeoutError("it did not happen")
        time.sleep(_NAP_SECONDS)
    return round(time.monotonic() - began, 2)


def _empty(number: int) -> int:
    return number


def _connected(cluster: Cluster) -> tuple[Any, Callable[[int], object]]:
    """Returns the runner, and a function that runs empty tasks."""
    if cluster.engine == "ray":
        import ray

        from branching.cluster import RayRunner

        def nodes() -> int:
            try:
                if not ray.is_initialized():
                    ray.init(
                        address=cluster.address, log_to_driver=False, logging_level=logging.ERROR
                    )
                return sum(each["Alive"] for each in ray.nodes()) - 1  # type: ignore[no-untyped-call]
            except Exception:  # the head is not up
                return 0

        _wait_until(lambda: nodes() == NODES)
        empty = ray.remote(_empty)
        return RayRunner(), lambda n: ray.get([empty.remote(each) for each in range(n)])
    from distributed import Client

    from branching.cluster import DaskRunner

    _wait_until(lambda: "Scheduler at" in (cluster.place / "head.log").read_text())
    client = Client(cluster.address)
    client.wait_for_workers(NODES, timeout=60)
    return DaskRunner(), lambda n: client.gather(client.map(_empty, range(n), pure=False))


def ends(cluster: Cluster, runner: Any) -> dict[str, float]:
    """Returns how long losers live, and how long anything stays on the nodes, in seconds."""
    from branching import Speculate, Workspace
    from branching.patterns.command_candidate import Program, shell

    figures: dict[str, float] = {}
    base = cluster.place / "base"
    base.mkdir()
    with Workspace.open(base) as space:

        def command(text: str) -> Program:
            return Program(shell(text), workspace=space.seen_at, owner=None)

        def watch(event: Any) -> None:
            if event.kind == "finished" and event.index == 0:
                seconds = lambda: figures.update(losers=_wait_until(lambda: not cluster.attempts()))  # noqa: E731
                thread.append(threading.Thread(target=seconds))
                thread[0].start()

        thread: list[threading.Thread] = []
        losers = [command("trap '' TERM; sleep 86393; true") for _ in range(2)]
        race = Speculate([command("sleep 3; touch won"), *losers], runner=runner, on_event=watch)
        outcome = race(space)
        states = [each.state for each in outcome.all_results]
        assert states == ["won", "cancelled", "cancelled"], outcome
        figures["all_after_a_call"] = _wait_until(lambda: not cluster.left())
        thread[0].join()
        words = [*PYTHON, "branching", "best-of-n", "-n", "3", "--runner", cluster.engine]
        words += ["--address", cluster.address, "-w", str(base), "--", "sleep", "86393"]
        program = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        running = b"sleep\x0086393"
        _wait_until(lambda: sum(words.startswith(running) for _, words, _ in _processes()) == NODES)
        program.kill()
        program.wait()
        figures["attempts_after_a_killed_program"] = _wait_until(lambda: not cluster.attempts())
        figures["all_after_a_killed_program"] = round(
            figures["attempts_after_a_killed_program"] + _wait_until(lambda: not cluster.left()), 2
        )
        (anchor,) = space.branches()
        abort = [*PYTHON, "branching", "abort", "-w", str(base), anchor.name]
        subprocess.run(abort, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return figures


def main() -> None:
    """Prints one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_network")
    parser.add_argument("-n", type=int, default=200, help="attempts")
    parser.add_argument("--runner", choices=["ray", "dask"], default="ray")
    parser.add_argument("--head-processors", type=int, default=0, help="that Ray's head offers")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        words = [*PYTHON, "benchmarks.cluster_network", *sys.argv[1:], "--inside"]
        os.execvp("unshare", ["unshare", *NAMESPACES, *words])
    place = Path(tempfile.mkdtemp(prefix="cluster-", dir="/var/tmp"))
    cluster = Cluster(options.runner, place, head_processors=options.head_processors)
    figures: dict[str, Any] = {"runner": options.runner}
    status = 1
    try:
        cluster.start()
        runner, run_empty_tasks = _connected(cluster)
        run_empty_tasks(4 * NODES)
        with cluster.counting(figures, "idle"):
            time.sleep(IDLE_SECONDS)
        with cluster.counting(figures, "empty_tasks"):
            run_empty_tasks(options.n)
        figures |= measure(
            runner, attempts=options.n, counting=lambda name: cluster.counting(figures, name)
        )
        figures["seconds_until_gone"] = ends(cluster, runner)
        print(json.dumps(figures), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for node in cluster.nodes:
            node.kill()
            node.wait()
        shutil.rmtree(place, ignore_errors=True)
        os._exit(status)  # Ray would wait for nodes. All processes end with this one.


if __name__ == "__main__":
    main()
