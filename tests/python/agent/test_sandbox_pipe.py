"""The pipes between an agent's sandbox and its client, without namespaces: these do not matter."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from branching.agent.sandbox import BranchSandbox, wire
from branching.agent.sandbox.server import Server
from branching.agent.sandbox.wire import FACTS_BYTES_MAX

LOAD = """
import asyncio, faulthandler, sys
from pathlib import Path
from branching.agent.sandbox import BranchSandbox

faulthandler.dump_traceback_later(40, exit=True)
place = Path(sys.argv[1])
large = bytes(200 << 10)  # more than a pipe holds: a writer waits for its reader
(place / "large").write_bytes(large)

async def read(sandbox):
    for _ in range(100):
        _, data = await sandbox.call("read", path=str(place / "large"))
        assert data == large

async def write(sandbox, name):
    for _ in range(100):
        await sandbox.call("write", body=large, path=str(place / name))

async def cancel(sandbox):
    for _ in range(30):
        run = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
        await asyncio.sleep(0.01)
        run.cancel()
        assert isinstance((await asyncio.gather(run, return_exceptions=True))[0], BaseException)

async def main():
    sandbox = BranchSandbox(place, isolation="none")
    try:
        await sandbox.call("cwd")
        work = read(sandbox), read(sandbox), write(sandbox, "a"), write(sandbox, "b")
        await asyncio.gather(*work, cancel(sandbox))
    finally:
        sandbox.close()

asyncio.run(main())
"""


def test_large_requests_replies_and_cancellations_do_not_wait_for_each_other(place: Path) -> None:
    """Runs in a child process, which prints the stacks of its threads if it hangs."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(place)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_request_that_is_too_long_is_refused_and_the_next_is_answered(place: Path) -> None:
    async def ask() -> str:
        sandbox = BranchSandbox(place, isolation="none")
        try:
            with pytest.raises(ValueError, match="too long to be sent"):
                await sandbox.call("stat", path="x" * FACTS_BYTES_MAX)
            return str((await sandbox.call("cwd"))[0]["path"])
        finally:
            sandbox.close()

    assert asyncio.run(ask()) == str(place)


def test_an_answer_that_is_too_long_is_replaced_by_an_error(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any answer the caller would wait for ever."""
    monkeypatch.setattr(wire, "FACTS_BYTES_MAX", 500)
    for number in range(100):
        (place / f"{number}").touch()
    (requests, ask), (answers, replies) = os.pipe(), os.pipe()
    wire.write_frame(ask, wire.encode_frame({"id": 7, "op": "list", "path": str(place)}))
    os.close(ask)
    Server(replies).serve(requests)
    answer = wire.read_frame(answers)
    assert answer is not None
    assert (answer[0]["id"], answer[0]["errno"]) == (7, errno.EMSGSIZE)
    for descriptor in (requests, answers, replies):
        os.close(descriptor)
