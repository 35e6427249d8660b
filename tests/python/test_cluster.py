"""Attempts on clusters of three nodes, in a network namespace with a loopback interface only.

Each node has a base cache of its own. The program of a test runs in the namespace too, so it is a
process of its own: `on_cluster` writes what it needs before the test's own lines. A cluster takes
longer to start than a test takes to run, so tests share one, unless they kill nodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from support.branchfs import find_program
from support.command import branching
from test_attempt import TASK, make_project, tree

from branching import BestOfN, ClusterError, Workspace
from branching.cluster import RayRunner
from branching.patterns.command_candidate import Program

RAY = """
import pathlib, sys
from ray.cluster_utils import Cluster

place = pathlib.Path(sys.argv[1])

def node(number):
    cache = {"BRANCHING_CACHE": str(place / f"cache-{number}")}
    return cluster.add_node(num_cpus=1, env_vars=cache)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [node(number) for number in range(3)]
"""
RAY_PROGRAM = """
import ray
address = sys.argv[2] if len(sys.argv) > 2 else cluster.address
ray.init(address=address, log_to_driver=False, logging_level="warning")
runner = RayRunner()
"""
DASK = """
import pathlib, sys
from distributed import SpecCluster, Nanny, Scheduler

place = pathlib.Path(sys.argv[1])

def options(number):
    cache = {"BRANCHING_CACHE": str(place / f"cache-{number}")}
    return {"nthreads": 1, "env": cache, "local_directory": str(place)}

class Cluster(SpecCluster):
    address = property(lambda self: self.scheduler_address)
    shutdown = SpecCluster.close

if __name__ == "__main__":
    workers = {each: {"cls": Nanny, "options": options(each)} for each in range(3)}
    scheduler = {"cls": Scheduler, "options": {"dashboard": False}}
    cluster = Cluster(workers=workers, scheduler=scheduler)
"""
DASK_PROGRAM = """
runner = DaskRunner(sys.argv[2])
"""
KEEP = """
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
BEGIN = """
import faulthandler, os, pathlib, signal, subprocess, sys, time
faulthandler.dump_traceback_later(240, exit=True)  # before pytest's timeout ends the whole run
from branching import BestOfN, ClusterError, ConflictError, Speculate, Workspace
from branching.cluster import DaskRunner, RayRunner
from branching.patterns.command_candidate import Program, shell

base = pathlib.Path(sys.argv[1]) / "base"

def command(text):
    return Program(shell(text), workspace=space.seen_at, owner=None, score=True)

def error_of(runner):
    outcome = BestOfN(command("true"), 1, runner=runner)(space)
    (result,) = outcome.all_results
    assert result.state == "error" and isinstance(result.exception, ClusterError), result
    assert result.exception.node, result
    return str(result.exception)

def sleeping(place=base.parent):
    found = []
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_sleep = (each / "cmdline").read_bytes().startswith(b"sleep\\0")
            mark = b"BRANCHING_WORKSPACE=" + os.fsencode(place)
            if is_sleep and mark in (each / "environ").read_bytes():
                found.append(int(each.name))
        except OSError:
            pass
    return found

"""
LEFT_SECONDS_MAX = 150.0
"""How long a killed node may take to be cleaned up before the test fails, on a loaded machine."""
IN_NAMESPACE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']


@dataclass(frozen=True)
class SharedCluster:
    """A cluster of three nodes for several tests."""

    engine: str
    place: Path
    pid: int
    address: str


def started(words: Sequence[str], place: Path, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Ray's sockets have paths of at most 107 bytes.
        env={
            **os.environ,
            "RAY_TMPDIR": "/tmp",
            # Ray would use a token that an earlier cluster of this user has left.
            "RAY_AUTH_MODE": "disabled",
            "DASK_TEMPORARY_DIRECTORY": str(place),
            "DASK_CONFIG": str(place),
            "PYTHONUNBUFFERED": "1",
        },
        **options,
    )


@pytest.fixture(scope="module")
def ray(scratch: Path) -> Iterator[SharedCluster]:
    with shared("ray", RAY + KEEP, scratch) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def dask(scratch: Path) -> Iterator[SharedCluster]:
    lines = "".join(f"    {line}\n" for line in KEEP.strip().split("\n"))
    with shared("dask", DASK + lines, scratch) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["ray", "dask"])
def cluster(request: pytest.FixtureRequest) -> SharedCluster:
    found: SharedCluster = request.getfixturevalue(request.param)
    return found


@contextmanager
def shared(engine: str, text: str, scratch: Path) -> Iterator[SharedCluster]:
    place = Path(tempfile.mkdtemp(prefix="cluster-", dir=scratch))
    # Dask's processes import it. A sandbox shows the directory of a program, but not what is
    # mounted below it: so no cache is there.
    program_file = place / "program" / "program.py"
    program_file.parent.mkdir()
    program_file.write_text(text)
    words = [*IN_NAMESPACE, sys.executable, str(program_file), str(place)]
    with (place / "errors").open("w") as errors:
        program = started(words, place, stdin=subprocess.PIPE, stderr=errors)
    assert program.stdout is not None
    address = program.stdout.readline().strip()
    assert address, (place / "errors").read_text()[-8000:]
    yield SharedCluster(engine, place, program.pid, address)
    program.communicate()
    shutil.rmtree(place)


def begun(place: Path, body: str, cluster: SharedCluster | None) -> subprocess.Popen[str]:
    lines = "".join(f"    {line}\n" for line in body.strip("\n").split("\n"))
    is_dask = cluster is not None and cluster.engine == "dask"
    text = BEGIN + (DASK_PROGRAM if is_dask else RAY_PROGRAM)
    text += f"with Workspace.open(base) as space:\n{lines}"
    if cluster is None:
        words = [
            *IN_NAMESPACE,
            sys.executable,
            "-c",
            f"{RAY}{text}ray.shutdown(); cluster.shutdown()",
        ]
        return started([*words, str(place)], place, stderr=subprocess.PIPE)
    words = [*in_namespace(cluster), sys.executable, "-c", text]
    words += [str(place), cluster.address]
    return started(words, place, stderr=subprocess.PIPE)


def on_cluster(place: Path, body: str, cluster: SharedCluster | None = None) -> None:
    """Runs Python lines on a cluster; an exception fails. Default: a new cluster."""
    program = begun(place, body, cluster)
    out, err = program.communicate()
    assert program.returncode == 0, f"{out}\n{err[-8000:]}"


@pytest.fixture
def base(place: Path, scratch: Path) -> Iterator[Path]:
    make_project(place / "base")
    yield place / "base"
    # The guard of each node's base ends when it is not used any more.
    wait_until(lambda: f" {scratch}/".encode() not in Path("/proc/self/mountinfo").read_bytes())


@pytest.fixture
def full_disk(place: Path) -> Iterator[Path]:
    """A file system with less room than the base needs."""
    path = place / "full"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.fixture
def without_fuse(place: Path) -> Path:
    """The program `branchfs` as it is on a machine that has no /dev/fuse."""
    path = place / "without-fuse"
    call = 'mount -t tmpfs none /dev && exec "$0" "$@"'
    path.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{call}' {find_program()} \"$@\"\n")
    path.chmod(0o755)
    return path


def in_namespace(cluster: SharedCluster) -> list[str]:
    return ["nsenter", f"--net=/proc/{cluster.pid}/ns/net"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LEFT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def sleeping(cluster: SharedCluster) -> list[str]:
    """Returns the processes of attempts on the cluster that run `sleep`, in whatever namespace."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_sleep = (process / "cmdline").read_bytes().startswith(b"sleep\0")
            mark = b"BRANCHING_WORKSPACE=" + os.fsencode(cluster.place)
            if is_sleep and mark in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def test_the_winner_of_a_cluster_is_that_of_a_local_call(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Each mode, owner, xattr, hard link and hole of the result. `evaluate` runs on the nodes."""
    local = place / "local"
    make_project(local)
    with Workspace.open(local) as space:
        words = ["sh", "-c", TASK]
        program = Program(words, workspace=space.seen_at, owner=None, score=True)
        assert BestOfN(program, 3)(space).committed
    on_cluster(
        place,
        f"""
outcome = BestOfN(command({TASK!r}), 6, max_parallel=3, runner=runner,
    evaluate=lambda path: -abs(2 - int((path / "attempt").read_text())))(space)
assert [each.score for each in outcome.all_results] == [-2, -1, 0, -1, -2, -3], outcome
assert outcome.winner.branch_index == 2 and outcome.winner.node, outcome
assert len({{each.node for each in outcome.all_results}}) > 1, outcome
""",
        cluster,
    )
    assert tree(base) == tree(local)
    assert (base / "sparse").stat().st_blocks < 100


def test_functions_return_print_and_fail_as_in_a_local_call(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    on_cluster(
        place,
        """
def task(path, number):
    print("from", number)
    (path / f"made-{number}").touch()
    if number == 2:
        raise ValueError("no luck")
    return number != 3, number * 10

events = []
outcome = BestOfN(task, 4, runner=runner, on_event=events.append)(space)
assert [each.state for each in outcome.all_results] == ["succeeded", "won", "error", "failed"]
assert repr(outcome.all_results[2].exception) == "ValueError('no luck')", outcome
assert outcome.winner.return_value == (True, 10), outcome
assert sorted(each.text for each in events if each.kind == "output") == [
    f"from {number}" for number in range(4)], events

def unfit(path):
    raise RuntimeError("evaluate is wrong")

try:
    BestOfN(task, 2, evaluate=unfit, runner=runner)(space)
    raise AssertionError("an error of evaluate must end the call")
except RuntimeError as error:
    assert str(error) == "evaluate is wrong"
assert space.branches() == []
""",
        cluster,
    )
    assert (base / "made-1").exists()
    assert not (base / "made-0").exists()


def test_the_node_and_the_output_come_while_an_attempt_runs(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Each attempt goes on when its first line has come. No message is lost or comes twice."""
    on_cluster(
        place,
        f"""
def on_event(event):
    events.append(event)
    if event.kind == "output" and event.text == "begun":
        begun.append(event)
    if len(begun) == 2:
        begun.clear()
        while len(found := sleeping({str(cluster.place)!r})) < 2:
            time.sleep(0.1)
        for pid in found:
            os.kill(pid, signal.SIGTERM)

events, begun = [], []
lines = "for number in 1 2 3; do echo $number; sleep 0.4; done; seq 30000"
task = command(f"echo begun; sleep 86396; {{lines}}")
outcome = BestOfN(task, 2, runner=runner, on_event=on_event)(space)
assert outcome.committed, outcome
for index in range(2):
    own = [each for each in events if each.index == index]
    assert [each.kind for each in own[:3]] == ["started", "placed", "output"], own
    assert own[1].node == outcome.all_results[index].node, own
    said = [line for each in own if each.kind == "output" for line in each.text.split("\\n")]
    said.remove("Terminated")  # of the shell
    assert said[:4] == ["begun", "1", "2", "3"], said[:9]
    assert said[4:] == [str(number) for number in range(1, 30001)], len(said)
""",
        cluster,
    )


def test_the_other_patterns_choose_on_a_cluster_as_in_a_local_call(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """A later attempt starts from the layers of earlier ones. Callbacks see the branch."""
    on_cluster(
        place,
        """
from branching import BeamSearch, Cascaded, Reflexion, TreeOfThoughts, Tournament
from branching.patterns.command_candidate import FeedbackCandidate
here = os.getpid()

def adding(letter, score):
    def strategy(path):
        assert os.getpid() != here
        with (path / "word").open("a") as file:
            file.write(letter)
        return True, score
    return strategy

def word(path):
    return (path / "word").read_text()

def by_word(path):
    scores = {"a": 1, "b": 2, "ac": 3, "bc": 2, "ad": 1, "bd": 5, "bdf": 7, "bde": 6}
    return scores.get(word(path), 0)

seen = []
def expand(path, depth):
    assert os.getpid() == here
    seen.append((depth, word(path)))
    return [adding(letter, 0) for letter in ("cd" if depth == 1 else "ef")]

strategies = [adding("a", 9), adding("b", 1)]
outcome = BeamSearch(strategies, expand=expand, evaluate=by_word, beam_width=2, max_depth=3,
    runner=runner)(space)
assert outcome.committed and word(base) == "bdf", (outcome, word(base))
assert seen == [(1, "b"), (1, "a"), (2, "bd"), (2, "ac")], seen
assert all(each.node for each in outcome.all_results), outcome
assert space.branches() == []

(base / "word").unlink()
seen.clear()
outcome = TreeOfThoughts(strategies, expand=expand, evaluate=by_word, max_depth=3,
    runner=runner)(space)
assert outcome.committed and word(base) == "bdf", (outcome, word(base))
assert seen == [(1, "b"), (2, "bd")], seen
assert space.branches() == []

def entrant(path, number):
    (path / "entry").write_text(str(number))
    return number != 0
def judge(a, b):
    return int((a / "entry").read_text() < (b / "entry").read_text())
outcome = Tournament(entrant, 4, judge=judge, runner=runner)(space)
assert [each.state for each in outcome.all_results] == ["failed", "succeeded", "succeeded", "won"]
assert (base / "entry").read_text() == "3"

def task(path, feedback):
    (path / "learnt").write_text(repr(feedback))
    return len(feedback) == 2, f"try {len(feedback)}"
outcome = Cascaded(task, fan_out=(2, 1), runner=runner)(space)
assert outcome.committed and (base / "learnt").read_text() == "['try 0', 'try 0']", outcome

text = 'echo lesson; test -n "$BRANCHING_FEEDBACK" && echo "$BRANCHING_FEEDBACK" > fed'
teaching = FeedbackCandidate(shell(text), workspace=space.seen_at, owner=None)
outcome = Cascaded(teaching, fan_out=(1, 1), runner=runner)(space)
assert outcome.committed and "lesson" in (base / "fed").read_text(), outcome

def retried(path, number, feedback):
    (path / "draft").write_text(f"draft {number} after {feedback}")
    return number == 1
def critique(path):
    return (path / "draft").read_text()
outcome = Reflexion(retried, critique=critique, runner=runner)(space)
assert [each.state for each in outcome.all_results] == ["failed", "won"], outcome
assert (base / "draft").read_text() == "draft 1 after draft 0 after None"

def late(path, number):
    (path / "late").write_text(str(number))
    time.sleep(0 if number < 2 else 600)
    return True, number
from branching.patterns.completion_queue import CompletionQueue
queues = []
act_in_time = CompletionQueue.act_in_time
def remembered(self, *arguments):
    queues.append(self)
    return act_in_time(self, *arguments)
CompletionQueue.act_in_time = remembered
def end_the_time(event):  # as soon as both others have succeeded
    ended.append(event.index) if event.kind == "scored" else None
    if len(ended) == 2:
        queues[-1]._deadline = 0.0
ended = []
outcome = BestOfN(late, 3, timeout=3600, runner=runner, on_event=end_the_time)(space)
assert [each.state for each in outcome.all_results] == ["succeeded", "won", "timed_out"], outcome
assert (base / "late").read_text() == "1"
assert space.branches() == []
""",
        cluster,
    )


def test_the_losers_of_a_race_end_on_all_nodes(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Also one that ignores SIGTERM, and those that still wait for a node."""
    on_cluster(
        place,
        """
losers = [command("trap '' TERM; echo $$ > pid; sleep 86399") for _ in range(8)]
outcome = Speculate([command("sleep 1; echo won > won"), *losers], runner=runner)(space)
assert [each.state for each in outcome.all_results] == ["won"] + 8 * ["cancelled"], outcome
assert space.branches() == []
""",
        cluster,
    )
    assert (base / "won").read_text() == "won\n"
    wait_until(lambda: not sleeping(cluster))


def test_a_local_edit_meanwhile_is_a_conflict(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    on_cluster(
        place,
        """
def edit(event):
    if event.kind == "finished":
        (base / "script").write_text("edited\\n")
try:
    BestOfN(command("echo more >> script"), 1, runner=runner, on_event=edit)(space)
    raise AssertionError("it was committed")
except ConflictError as error:
    assert error.paths == ("script",), error
    assert "branching load" in error.hint
    kept = pathlib.Path(error.hint.rpartition("kept in ")[2].split(",")[0])
    assert b"more" in kept.read_bytes()
    kept.unlink()
assert space.branches() == []
""",
        cluster,
    )
    assert (base / "script").read_text() == "edited\n"


def test_a_node_that_dies_loses_its_attempts_only(base: Path, place: Path) -> None:
    """First a node in mid-run, then the node of the best after it has answered."""
    on_cluster(
        place,
        """
import threading
def kill():
    while len(sleeping()) < 3:  # one on each node
        time.sleep(0.1)
    cluster.remove_node(nodes[0], allow_graceful=False)
    while len(sleeping()) > 2:
        time.sleep(0.1)
    for pid in sleeping():
        os.kill(pid, signal.SIGTERM)  # the others go on
threading.Thread(target=kill).start()
outcome = BestOfN(command("sleep 86391; echo $BRANCHING_ATTEMPT > a"), 3, runner=runner)(space)
states = sorted(each.state for each in outcome.all_results)
assert states == ["error", "succeeded", "won"], outcome
lost = [each for each in outcome.all_results if each.state == "error"]
assert isinstance(lost[0].exception, ClusterError), lost

def task(path, number):
    (path / "b").write_text(str(number))
    return True, number

def ranked(path):
    return int((path / "b").read_text())

killed = []
from branching.cluster.cluster_runner import ClusterRunner
bring = ClusterRunner.bring
def kill_then_bring(self, attempt):
    if not killed:
        by_id = {each.node_id[:8]: each for each in nodes[1:]}
        cluster.remove_node(by_id[attempt.node.rpartition("/")[2]], allow_graceful=False)
        killed.append(attempt.node)
    return bring(self, attempt)
ClusterRunner.bring = kill_then_bring
outcome = BestOfN(task, 6, evaluate=ranked, runner=runner)(space)
first = [each for each in outcome.all_results if each.node == killed[0]]
assert outcome.committed and outcome.winner.node != killed[0], outcome
assert isinstance(first[-1].exception, ClusterError), first[-1]
assert first[-1].state == "error" and "lost" in str(first[-1].exception), first[-1]
assert space.branches() == []
""",
    )


DASK_WORKERS = """
import atexit
from distributed import Client
names = [f"mortal-{number}" for number in range(3)]
words = [sys.executable, "-m", "distributed.cli.dask_worker", sys.argv[2], "--no-nanny"]
words += ["--no-dashboard", "--nthreads", "1", "--local-directory", str(base.parent), "--name"]
for name in names:
    own = os.environ | {"BRANCHING_CACHE": str(base.parent / name)} | variables.get(name, {})
    worker = subprocess.Popen([*words, name], env=own, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True)
    atexit.register(worker.kill)
runner = DaskRunner(sys.argv[2], dask_options={"workers": names})
client = runner._connected()
client.wait_for_workers(6)
"""
DASK_KILL = (
    "variables = {}\n"
    + DASK_WORKERS
    + """
workers = client.scheduler_info(n_workers=-1)["workers"]
mortals = [address for address, worker in workers.items() if worker["name"] in names]
found = client.run(os.getpid, workers=mortals)
pids = {address.rpartition(":")[2]: pid for address, pid in found.items()}
def kill(node):
    os.kill(pids[node.rpartition("/")[2].rpartition(":")[2]], signal.SIGKILL)
"""
)


def test_a_worker_of_dask_that_dies_loses_its_attempts_only(
    base: Path, place: Path, dask: SharedCluster
) -> None:
    """As above, with three more workers of the cluster, which are killed."""
    on_cluster(
        place,
        DASK_KILL
        + """
import threading
placed = []
def on_event(event):
    if event.kind == "placed":
        placed.append(event.node)
def kill_one():
    while len(placed) < 3 or len(sleeping()) < 3:  # one on each node
        time.sleep(0.1)
    kill(placed[0])
    while len(sleeping()) > 2:
        time.sleep(0.1)
    for pid in sleeping():
        os.kill(pid, signal.SIGTERM)  # the others go on
threading.Thread(target=kill_one).start()
task = command("sleep 86391; echo $BRANCHING_ATTEMPT > a")
outcome = BestOfN(task, 3, runner=runner, on_event=on_event)(space)
states = sorted(each.state for each in outcome.all_results)
assert states == ["error", "succeeded", "won"], outcome
lost = [each for each in outcome.all_results if each.state == "error"]
assert isinstance(lost[0].exception, ClusterError) and lost[0].node == placed[0], lost
assert len(placed) == 3, placed

def task(path, number):
    (path / "b").write_text(str(number))
    return True, number

def ranked(path):
    return int((path / "b").read_text())

killed = []
from branching.cluster.cluster_runner import ClusterRunner
bring = ClusterRunner.bring
def kill_then_bring(self, attempt):
    if not killed:
        kill(attempt.node)
        killed.append(attempt.node)
    return bring(self, attempt)
ClusterRunner.bring = kill_then_bring
outcome = BestOfN(task, 6, evaluate=ranked, runner=runner)(space)
first = [each for each in outcome.all_results if each.node == killed[0]]
assert outcome.committed and outcome.winner.node != killed[0], outcome
assert isinstance(first[-1].exception, ClusterError), first[-1]
assert first[-1].state == "error" and "lost" in str(first[-1].exception), first[-1]
assert (base / "b").read_text() == str(outcome.winner.branch_index), outcome
assert space.branches() == []
""",
        dask,
    )


def test_a_disk_that_fills_during_an_attempt_is_named(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Only one node's disk is full: the other nodes' attempts continue, and so does the node."""
    image, disk = place / "image", cluster.place / "cache-0"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    try:
        on_cluster(
            place,
            f"""
import threading
ended = []
def on_event(event):
    if event.kind == "finished":
        ended.append(event)
def go_on():
    while len(ended) < 3:
        found = sleeping({str(cluster.place)!r})
        if len(found) + len(ended) == 3:  # one on each node
            for pid in found:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
threading.Thread(target=go_on).start()
fill = "head -c 64M /dev/zero > big && rm big && echo $BRANCHING_ATTEMPT > made"
task = command("sleep 86394; " + fill)
outcome = BestOfN(task, 3, runner=runner, on_event=on_event)(space)
states = sorted(each.state for each in outcome.all_results)
assert states == ["error", "succeeded", "won"], outcome
(full,) = [each for each in outcome.all_results if each.state == "error"]
assert isinstance(full.exception, ClusterError) and full.exception.node == full.node, full
assert "ran out of disk space" in str(full.exception), full
""",
            cluster,
        )
        wait_until(lambda: shutil.disk_usage(disk).free > 8 << 20)
    finally:
        wait_until(lambda: subprocess.run(["umount", "-q", disk], check=False).returncode == 0)


def test_the_base_goes_to_one_worker_of_a_machine(
    base: Path, place: Path, dask: SharedCluster
) -> None:
    """The other workers fetch it from there if their cache does not have it.

    Counted when it is put: some seconds later Dask keeps one replica, whatever was made.
    """
    on_cluster(
        place,
        """
from branching.cluster.dask_runner import _DaskEngine
put = _DaskEngine.put
def noting(self, data):
    key = put(self, data)
    holders.append(len(self._client.who_has([self._put[key]])[key]))
    return key
_DaskEngine.put = noting
holders = []
outcome = BestOfN(command("sleep 0.5; touch made"), 4, runner=runner)(space)
assert outcome.committed and len({each.node for each in outcome.all_results}) > 1, outcome
assert holders == [1], holders
""",
        dask,
    )
    assert (base / "made").exists()


def test_a_base_whose_worker_has_died_comes_again(
    base: Path, place: Path, dask: SharedCluster
) -> None:
    """The only worker that has it is killed before the others, whose caches lack it, ask for it."""
    on_cluster(
        place,
        DASK_KILL
        + """
from branching.cluster import dask_runner
dask_runner._one_of_each_node = lambda _: mortals[:1]
put = dask_runner._DaskEngine.put
def put_and_kill(self, data):
    key = put(self, data)
    kill(mortals[0])
    return key
dask_runner._DaskEngine.put = put_and_kill
task = command("sleep 0.5; echo $BRANCHING_ATTEMPT > a")
outcome = BestOfN(task, 4, runner=runner)(space)
assert sorted(each.state for each in outcome.all_results) == [*3 * ["succeeded"], "won"], outcome
dead = mortals[0].rpartition(":")[2]
assert dead not in {each.node.rpartition("/")[2] for each in outcome.all_results}, outcome
assert space.branches() == []
""",
        dask,
    )
    assert (base / "a").exists()


def test_a_killed_driver_leaves_nothing_on_nodes_and_a_local_branch(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """The branch of a program is dropped by the next one, that of a command line stays.

    Before, another program sees the node and the output of the attempt that runs.
    """
    body = 'BestOfN(command("exec sleep 86398"), 2, runner=runner)(space)'
    program = begun(place, body, cluster)
    race = place / "race"
    make_project(race)
    words = [
        *in_namespace(cluster),
        sys.executable,
        "-m",
        "branching",
        "speculate",
        "-w",
        str(race),
    ]
    words += ["--runner", cluster.engine, "--address", cluster.address]
    words += ["-c", "echo begun; exec sleep 86398"]
    command = started(words, place, stderr=subprocess.DEVNULL)

    def is_followed() -> bool:
        listed = branching(race, "log", "--json").document["candidates"]
        logs = race / ".branching" / "logs"
        return [(each["state"], bool(each.get("node"))) for each in listed] == [
            ("running", True)
        ] and (logs / f"{listed[0]['branch']}.log").read_text() == "begun\n"

    try:
        wait_until(lambda: len(sleeping(cluster)) == 3)
        wait_until(is_followed)
    finally:
        for each in (program, command):
            each.kill()
            each.communicate()
    wait_until(lambda: not sleeping(cluster))
    with Workspace.open(base) as space:
        assert space.dropped, "the anchor was dropped by the next program"
        assert space.branches() == []
    (anchor,) = branching(race, "ls", "--json").document["branches"]
    assert anchor["name"].endswith("-setup"), anchor
    assert branching(race, "abort", anchor["name"]).code == 0
    assert branching(race, "ls", "--json").document["branches"] == []


def test_a_node_that_cannot_run_attempts_is_refused_with_its_reason(
    base: Path, place: Path, ray: SharedCluster, full_disk: Path, without_fuse: Path
) -> None:
    """No branchfs, no /dev/fuse, a full disk, and other versions."""
    (base / "large").write_bytes(os.urandom(4 << 20))
    assert (full_disk, without_fuse) == (place / "full", place / "without-fuse")
    on_cluster(
        place,
        """
def reason(**variables):
    return error_of(RayRunner(ray_options={"runtime_env": {"env_vars": variables}}))

assert "there is no program" in reason(BRANCHFS="/no/branchfs")
assert "mount failed: No such file" in reason(BRANCHFS=str(base.parent / "without-fuse"),
    BRANCHING_CACHE=str(base.parent / "own"))
full = base.parent / "full"
assert "No space left" in reason(BRANCHING_CACHE=str(full))
assert [each.name for each in (full / "bases").iterdir() if each.is_dir()] == []
from branching.cluster import cluster_runner
cluster_runner.own_version = lambda: ("9.9", "2.7")
assert "and Python 3." in (said := reason()) and "not 9.9 and 2.7" in said, said
assert space.branches() == []
""",
        ray,
    )


def test_a_worker_of_dask_that_cannot_run_attempts_says_so(
    base: Path, place: Path, dask: SharedCluster, full_disk: Path, without_fuse: Path
) -> None:
    """As above, with three more workers of the cluster."""
    (base / "large").write_bytes(os.urandom(4 << 20))
    assert (full_disk, without_fuse) == (place / "full", place / "without-fuse")
    on_cluster(
        place,
        """
variables = {
    "mortal-0": {"BRANCHFS": "/no/branchfs"},
    "mortal-1": {"BRANCHFS": str(base.parent / "without-fuse")},
    "mortal-2": {"BRANCHING_CACHE": str(base.parent / "full")},
}
"""
        + DASK_WORKERS
        + """
def reason(name):
    return error_of(DaskRunner(sys.argv[2], dask_options={"workers": [name]}))

assert "there is no program" in reason(names[0])
assert "mount failed: No such file" in reason(names[1])
assert "No space left" in reason(names[2])
full = base.parent / "full"
assert [each.name for each in (full / "bases").iterdir() if each.is_dir()] == []
from branching.cluster import cluster_runner
cluster_runner.own_version = lambda: ("9.9", "2.7")
assert "and Python 3." in (said := reason(names[0])) and "not 9.9 and 2.7" in said, said
assert space.branches() == []
""",
        dask,
    )


def test_a_worker_of_dask_without_branching_says_so(
    base: Path, place: Path, dask: SharedCluster
) -> None:
    """A worker that cannot import the function of a task would end, and the call wait for another.

    Its interpreter refuses the import.
    """
    on_cluster(
        place,
        """
import atexit
text = "import sys; sys.modules['branching'] = None; import distributed.cli.dask_worker as worker; "
words = [sys.executable, "-c", text + "worker.main()", sys.argv[2], "--no-nanny", "--name", "bare"]
words += ["--no-dashboard", "--nthreads", "1", "--local-directory", str(base.parent)]
worker = subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True)
atexit.register(worker.kill)
runner = DaskRunner(sys.argv[2], dask_options={"workers": ["bare"]})
runner._connected().wait_for_workers(4)
outcome = BestOfN(command("true"), 2, runner=runner)(space)
assert [each.state for each in outcome.all_results] == ["error", "error"], outcome
for each in outcome.all_results:
    assert isinstance(each.exception, ClusterError), each
    assert "No module named 'branching" in str(each.exception), each
""",
        dask,
    )


def test_a_race_on_the_command_line_runs_on_a_cluster(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Excluded and hidden files are not sent; the log and the document name the node."""
    (base / ".env").write_text("secret\n")
    (base / "[key] *").write_text("secret key\n")
    os.link(base / "[key] *", base / "copy")
    on_cluster(
        place,
        f"""
import json
words = ["--runner", {cluster.engine!r}, "--address", sys.argv[2], "--exclude", ".env", "--json"]
words += ["--hide", "*key*"]
task = "test ! -e .env && test ! -e copy && test -e script || exit 1; echo said"
task += " && echo $BRANCHING_ATTEMPT | tee made >&3"
def branching(*words):
    words = [sys.executable, "-m", "branching", *words]
    program = subprocess.run(words, stdout=subprocess.PIPE, cwd=base, check=True)
    return json.loads(program.stdout)
document = branching("best-of-n", "-n", "2", *words, "--", "sh", "-c", task)
assert document["winner"] == {{"index": 1, "score": 1.0}}, document
assert all(each["node"] and each["ended"] == "exit" for each in document["results"]), document
nodes = {{each["node"] for each in document["results"]}}
listed = branching("log", "--json")["candidates"]
assert {{each["node"] for each in listed}} == nodes, listed
name = document["results"][0]["branch"]
assert (base / ".branching" / "logs" / f"{{name}}.log").read_text() == "said\\n"
""",
        cluster,
    )
    assert (base / "made").read_text() == "1\n"
    assert (base / ".env").read_text() == "secret\n"
    bases = list(cluster.place.glob("cache-*/bases/*/script"))
    assert bases
    assert not [each for each in bases if (each.parent / "[key] *").exists()]


def test_each_race_of_the_command_line_chooses_on_a_cluster(
    base: Path, place: Path, cluster: SharedCluster
) -> None:
    """Candidates, scorers, judges, critics and expanders are commands."""
    on_cluster(
        place,
        f"""
import json
def race(*words):
    words = [*words[:1], "--runner", {cluster.engine!r}, "--address", sys.argv[2], "--json",
        *words[1:]]
    program = subprocess.run([sys.executable, "-m", "branching", *words],
        stdout=subprocess.PIPE, cwd=base, check=True)
    results = json.loads(program.stdout)["results"]
    assert all(each["node"] for each in results), results
    return [each["state"] for each in results]

def word():
    text = (base / "word").read_text()
    (base / "word").unlink()
    return text

race("speculate", "-c", "exit 1", "-c", "printf won > word")
assert word() == "won"
task = 'test -n "$BRANCHING_FEEDBACK" && printf "$BRANCHING_FEEDBACK" > word'
draft = f"printf new > draft; {{task}}"
states = race("reflexion", "--critique", "cat draft", "--", "sh", "-c", draft)
assert states == ["failed", "won"] and word() == "new", states
states = race("cascaded", "--fan-out", "1,1", "--", "sh", "-c", f"echo lesson; {{task}}")
assert states == ["failed", "won"] and "lesson" in word(), states
judge = 'test $(cat "$BRANCHING_A/word") -gt $(cat "$BRANCHING_B/word") && echo a || echo b'
race("tournament", "-n", "3", "--judge", judge, "--", "sh", "-c", "echo $BRANCHING_ATTEMPT > word")
assert word() == "2\\n"
search = ["-c", "printf a >> word", "-c", "printf b >> word", "--max-depth", "2",
    "--expand", "echo 'printf c >> word'; echo 'printf d >> word'",
    "--evaluate", "case $(cat word) in bd) echo 3;; b*) echo 2;; *) echo 1;; esac"]
for name in (["beam-search", "--beam-width", "2"], ["tree-of-thoughts"]):
    race(*name, *search)
    assert word() == "bd"
assert space.branches() == []
""",
        cluster,
    )


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("Version mismatch: The cluster was started with: ...", "the cluster's versions"),
        ("no token was sent", "RAY_AUTH_MODE=token"),
    ],
)
def test_a_failed_connection_to_ray_has_a_hint_for_its_cause(
    reason: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise RuntimeError(reason)

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=bool, init=init))
    runner = RayRunner(address="127.0.0.1:1")
    with pytest.raises(ClusterError, match=f"{reason[:16]}.*nothing was run") as refused:
        runner.open_runner(None)  # type: ignore[arg-type]
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--address", "here"], "need --runner"),
        (["--runner", "ray", "--on-error", "keep"], "--on-error keep"),
        (
            ["--runner", "dask", "--group-memory-limit", "1G"],
            "cannot be enforced on several machines",
        ),
        (["--runner", "dask", "--address", "tcp://127.0.0.1:1"], "cannot connect"),
        (["--runner", "ray", "--address", "ray://127.0.0.1:1"], "is for Ray clients"),
    ],
    ids=["address alone", "keep", "group limit", "unreachable", "Ray client"],
)
def test_options_of_the_command_line_are_checked(base: Path, words: list[str], said: str) -> None:
    done = branching(base, "best-of-n", *words, "--", "true")
    assert done.code != 0
    assert said in done.err, done.err


def test_a_container_of_the_wrapper_refuses_a_cluster(base: Path) -> None:
    words = ["best-of-n", "--runner", "ray", "--", "true"]
    done = branching(base, *words, BRANCHING_HOST_WORKSPACE=str(base))
    assert done.code == 2
    assert "use branching on the host" in done.err, done.err


def test_options_that_a_cluster_cannot_keep_are_refused(base: Path) -> None:
    from branching import ResourceLimits
    from branching.cluster.cluster_runner import ClusterRunner

    class Place:
        def open_runner(self, parent: object, **options: object) -> ClusterRunner:
            return ClusterRunner(parent, engine=None, exclude=(), **options)  # type: ignore[arg-type]

    def task(path: Path, number: int) -> bool:
        return True

    with Workspace.open(base) as space:
        with pytest.raises(ValueError, match="keep_failed"):
            BestOfN(task, runner=Place(), keep_failed=True)(space)
        with pytest.raises(ValueError, match="group_limits"):
            limits = ResourceLimits(memory=1 << 30)
            BestOfN(task, runner=Place(), group_limits=limits)(space)


def test_the_manifest_of_the_documentation_is_a_ray_cluster() -> None:
    """Types are those of KubeRay's resource: it refuses numbers among the parameters of Ray."""
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    manifest = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(each, str) for each in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {each["name"] for each in pod.get("volumes", [])}
        assert {each["name"] for each in container.get("volumeMounts", [])} == volumes
    worker = groups[1]["template"]["spec"]["containers"][0]
    assert worker["image"] == groups[0]["template"]["spec"]["containers"][0]["image"]
    assert worker["resources"]["limits"]["smarter-devices/fuse"] == 1
    assert "SYS_ADMIN" in worker["securityContext"]["capabilities"]["add"]
    assert groups[1]["minReplicas"] <= groups[1]["replicas"] <= groups[1]["maxReplicas"]


def test_the_example_of_the_documentation_runs(place: Path, ray: SharedCluster) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    assert "RayRunner(" in example
    (place / "base").mkdir()
    (place / "base" / "project").mkdir()
    example = example.replace("n=200", "n=3").replace('"project"', 'str(base / "project")')
    on_cluster(place, f'{example}\nassert (base / "project" / "answer").read_text() == "2"', ray)


SBATCH = """#!/bin/sh
cp "$1" "$0.job"
setsid bash "$0.job" >"$0.log" 2>&1 </dev/null &
echo "Submitted batch job $!"
"""


def test_the_example_with_slurm_runs_with_a_scheduler_of_one_machine(
    base: Path, place: Path, dask: SharedCluster
) -> None:
    """dask-jobqueue is real. `sbatch` runs the job script here, and `scancel` ends it."""
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    example = text.split("```python\n")[2].split("```")[0]
    assert "SLURMCluster(" in example
    (place / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("scancel", '#!/bin/sh\nkill -- "-$1"\n')):
        (place / "bin" / name).write_text(script)
        (place / "bin" / name).chmod(0o755)
    (place / "base" / "project").mkdir()
    for old, new in (
        ("cores=4", "cores=2"),
        ("processes=4", "processes=2"),
        ("jobs=10", "jobs=1"),
        ("workers(4)", "workers(2)"),
        ("n=200", "n=3"),
        ('"project"', 'str(base / "project")'),
    ):
        assert old in example, old
        example = example.replace(old, new)
    on_cluster(
        place,
        f"""
os.environ["PATH"] = str(base.parent / "bin") + ":" + os.environ["PATH"]
os.environ["SLURM_TMPDIR"] = str(base.parent)
import dask
# Both nodes get an attempt: no node takes that of one which still opens the base, or has ended its
# own before the next is submitted.
dask.config.set({{"distributed.scheduler.work-stealing": False}})
def attempt(path, number):
    time.sleep(1)
    (path / "answer").write_text(os.environ["SLURM_TMPDIR"])
    return True, number
{example}
jobs.close()
assert len({{each.node for each in outcome.all_results}}) == 2, outcome
assert (base.parent / "branching" / "bases").is_dir()
""",
        dask,
    )
    assert (base / "project" / "answer").read_text() == str(place)
