"""The logs of candidates: which are kept, and which make room for new ones."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from branching.runlog import run_log
from branching.runlog.events import Event
from branching.runlog.run_log import RunLog, read_entries


def begun(log: RunLog, branch: str) -> None:
    log.and_then(lambda _: None)(Event(kind="started", index=0, branch=branch, label=branch))


def ended(log: RunLog, branch: str) -> None:
    event = Event(kind="finished", index=0, branch=branch, label=branch, state="failed")
    log.and_then(lambda _: None)(event)


def test_logs_of_calls_under_way_are_kept_and_the_limit_holds_within_a_call(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "ENTRIES_MAX", 5)
    owner = (os.getuid(), os.getgid())
    with RunLog(place, owner, "speculate") as race, RunLog(place, owner, "speculate") as later:
        begun(race, "running-0")
        for number in range(12):
            begun(later, f"later-{number}")
            ended(later, f"later-{number}")
        kept = [entry.branch for entry in read_entries(place / "logs")]
        assert sorted(kept) == ["later-10", "later-11", "later-8", "later-9", "running-0"]
        assert {path.stem for path in (place / "logs").glob("*.log")} == set(kept)


def test_a_line_that_comes_while_the_logs_are_closed_reaches_no_other_file(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A function in a thread goes on after its call; the number of a closed log is soon that of
    another file.
    """
    with RunLog(place, (os.getuid(), os.getgid()), "speculate") as log:
        begun(log, "b")
        listener = log.and_then(lambda _: None)
        event = Event(kind="output", index=0, branch="b", text="late")
        late = threading.Thread(target=listener, args=(event,))
        close = run_log._Log.close

        def closing(each: Any) -> None:
            close(each)
            late.start()
            late.join(0.2)  # it is to wait

        monkeypatch.setattr(run_log._Log, "close", closing)
    late.join()
    assert capsys.readouterr().err == ""
    assert (place / "logs" / "b.log").read_text() == ""


def test_a_branch_of_the_same_name_closes_the_log_of_the_one_before(place: Path) -> None:
    with RunLog(place, (os.getuid(), os.getgid()), "speculate") as log:
        begun(log, "b")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        begun(log, "b")
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("step", ["bind", "listen"])
def test_a_control_socket_that_cannot_be_created_leaves_nothing(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: str,
) -> None:
    class Socket(socket.socket):
        def bind(self, address: Any) -> None:
            if step == "bind":
                raise OSError("no room")
            super().bind(address)

        def listen(self, *_: Any) -> None:
            raise OSError("no room")

    monkeypatch.setattr("branching.runlog.control_socket.socket.socket", Socket)
    with RunLog(place, (os.getuid(), os.getgid()), "speculate"):
        assert "no room" in capsys.readouterr().err
        assert list((place / "logs").iterdir()) == []
