#!/usr/bin/env python3
"""What a fork, a pick and a commit of a session take, by the memory of the session.

    .venv/bin/python -m benchmarks.session [MEGABYTES...]

The session holds an array of bytes and has a file open. For each size (100 and 1024 MB), medians
and maxima of some rounds, in milliseconds:

    fork 3          until all three children have answered, each with a file of its branch
    pick            the commit into the session's branch, until the winner has answered
    losers dead     from the call of pick until no loser and no earlier interpreter is alive

Then the memory of ten children together (the sum of PSS in /proc/PID/smaps_rollup), and how long
starting three interpreters takes that each load the same data. Where `criu check` succeeds, CRIU
dumps and restores a Python process of the same size.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from branching import Session

SIZES_MB = (100, 1024)
ROUNDS = 7
CHILDREN = 3
MANY_CHILDREN = 10
CRIU_SECONDS_MAX = 120.0
"""For one call of it. `criu check` takes some milliseconds."""
LOAD = "data = bytearray({size}); data[::4096] = b'x' * len(data[::4096])"


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or SIZES_MB
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'MB':>5}  {'what':<24} {'median ms':>10} {'max ms':>8}")
    for megabytes in sizes:
        rows, refusal = measured(megabytes), ""
        try:
            rows |= criu(megabytes)
        except RuntimeError as error:
            refusal = str(error)
        for what, samples in rows.items():
            middle, most = statistics.median(samples), max(samples)
            print(f"{megabytes:>5}  {what:<24} {middle:>10.1f} {most:>8.1f}", flush=True)
        if refusal:
            print(f"{megabytes:>5}  {'CRIU':<24} {refusal}", flush=True)
        total = shared_memory(megabytes)
        print(f"{megabytes:>5}  memory with {MANY_CHILDREN} children {total:>11.0f} MB", flush=True)


def measured(megabytes: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {"fork 3": [], "pick": [], "losers dead": []}
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as place,
        Session(place) as session,
        ThreadPoolExecutor(CHILDREN) as pool,
    ):
        session.run(LOAD.format(size=megabytes << 20)).result()
        session.run("log = open('log.txt', 'a')").result()
        for turn in range(ROUNDS + 1):
            started = time.perf_counter()
            children = session.fork(CHILDREN)
            code = "log.write('x'); log.flush(); len(open('log.txt').read())"
            cells = list(pool.map(lambda child: child.run(code), children))  # noqa: B023
            forked = time.perf_counter()
            assert all(cell.success for cell in cells)
            losers = [session.pid, *(child.pid for child in children[1:])]
            watching = pool.submit(until_dead, losers)
            began = time.perf_counter()
            session.pick(children[0])
            session.run("1").result()
            picked = time.perf_counter()
            dead = watching.result()
            if turn:
                samples["fork 3"].append((forked - started) * 1000)
                samples["pick"].append((picked - began) * 1000)
                samples["losers dead"].append((dead - began) * 1000)
        session.abort()
    samples["3 interpreters that load"] = [interpreters(megabytes) for _ in range(3)]
    return samples


def until_dead(pids: list[int]) -> float:
    """Waits until no process of these runs; returns when."""
    while any(is_running(pid) for pid in pids):
        time.sleep(0.0005)
    return time.perf_counter()


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def shared_memory(megabytes: int) -> float:
    """Returns the sum of PSS of a session and ten children that only look at their data, in MB."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place, Session(place) as session:
        session.run(LOAD.format(size=megabytes << 20)).result()
        children = session.fork(MANY_CHILDREN)
        for child in children:
            child.run("data[0], data[-1]").result()
        pids = [session.pid, *(child.pid for child in children)]
        total = sum(pss(pid) for pid in pids)
        session.abort()
    return total / 1024


def pss(pid: int) -> int:
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return int(next(row for row in rows if row.startswith("Pss:")).split()[1])


def interpreters(megabytes: int) -> float:
    """Returns how long three new interpreters take to have the same data."""
    started = time.perf_counter()
    code = LOAD.format(size=megabytes << 20)
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(CHILDREN)]
    for process in running:
        process.wait()
    return (time.perf_counter() - started) * 1000


def criu(megabytes: int) -> dict[str, list[float]]:
    """Returns how long CRIU takes to dump a process and to restore it once.

    RuntimeError says why there is no figure.
    """
    _criu("check")
    samples: dict[str, list[float]] = {"CRIU dump": [], "CRIU restore": []}
    code = (
        f"{LOAD.format(size=megabytes << 20)}\nprint(1, flush=True)\nimport time\ntime.sleep(600)"
    )
    for _ in range(3):
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as images,
            subprocess.Popen(
                ["setsid", sys.executable, "-c", code],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            ) as process,
        ):  # fmt: skip
            try:
                assert process.stdout is not None
                process.stdout.readline()
                process.stdout.close()
                words = ["-D", images, "--shell-job"]
                times = [time.perf_counter()]
                _criu("dump", "-t", str(process.pid), *words)
                times.append(time.perf_counter())
                process.wait()
                _criu("restore", "-d", *words)
                times.append(time.perf_counter())
                os.kill(process.pid, signal.SIGKILL)  # the restored one: it has the same number
            finally:
                process.kill()
        samples["CRIU dump"].append((times[1] - times[0]) * 1000)
        samples["CRIU restore"].append((times[2] - times[1]) * 1000)
    return samples


def _criu(*words: str) -> None:
    try:
        done = subprocess.run(
            ["criu", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CRIU_SECONDS_MAX,
            check=False,
        )
    except FileNotFoundError:
        raise RuntimeError("is not installed") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`criu {words[0]}` did not end") from None
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).splitlines()
        reason = next((line for line in lines if "Error" in line), f"exit code {done.returncode}")
        raise RuntimeError(f"`criu {words[0]}` failed: {reason}")


if __name__ == "__main__":
    main()
