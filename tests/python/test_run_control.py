"""Controlling the candidates of a call from another process, through its control socket."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import Running, branching
from support.waiting import SECONDS_MAX, until, until_unchanged

from branching import BranchError, Workspace
from branching.runlog import control_socket as control_servers
from branching.runlog.control_socket import ControlServer, is_alive, remove_stale, send_request
from branching.runlog.run_controller import WORDS_BYTES_MAX, RunController
from branching.runlog.run_log import Entry, read_entries


@pytest.fixture
def logs(real: Mounted) -> Path:
    return real.base / ".branching" / "logs"


class Call:
    """A race of commands that runs in another process."""

    def __init__(self, root: Path, logs: Path, *candidates: str, options: tuple[str, ...] = ()):
        words = [word for text in candidates for word in ("-c", text)]
        self.logs = logs
        self.running = Running(root, ["speculate", *options, *words])
        until(lambda: len(self.entries()) == len(candidates), "all candidates are known")

    def entries(self) -> list[Entry]:
        return read_entries(self.logs)

    def entry(self, index: int = 0) -> Entry:
        [found] = [entry for entry in self.entries() if entry.index == index]
        return found

    def output(self, index: int = 0) -> str:
        return (self.logs / f"{self.entry(index).branch}.log").read_text()

    def ask(self, do: str, text: str = "", index: int = 0) -> None:
        """Asks as soon as the candidate's process can be steered."""
        entry = self.entry(index)
        assert entry.door, "the entry names no door"
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            try:
                return send_request(self.logs / entry.door, do, entry.branch, text)
            except BranchError as error:
                if "cannot be controlled" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


COUNTING = "i=0; while [ ! -e /tmp/end ]; do i=$((i+1)); echo $i; sleep 0.02; done"


class TestFromAnotherProcess:
    def test_pause_stops_all_of_it_and_resume_lets_it_go_on(
        self, real: Mounted, logs: Path
    ) -> None:
        call = Call(real.root, logs, COUNTING)
        until(lambda: call.output().count("\n") > 2, "it counts")
        call.ask("pause")
        assert call.entry().state == "paused"
        until_unchanged(call.output, "the output stops")
        said = call.output()
        call.ask("resume")
        until(lambda: call.output() != said, "it goes on")
        assert call.entry().state == "running"
        call.ask("stop")
        assert call.running.done().code == 1

    def test_a_paused_candidate_can_be_stopped(self, real: Mounted, logs: Path) -> None:
        call = Call(real.root, logs, COUNTING)
        call.ask("pause")
        call.ask("stop")
        assert call.running.done().code == 1
        assert call.entry().state == "cancelled"

    def test_a_stop_ends_one_candidate_and_the_call_continues(
        self, real: Mounted, logs: Path
    ) -> None:
        waits = 'until grep -q go "$BRANCHING_STEER"; do sleep 0.02; done; touch won'
        call = Call(real.root, logs, COUNTING, waits)
        call.ask("stop", index=0)
        until(lambda: call.entry(0).state == "cancelled", "the first has ended")
        call.ask("tell", "go", index=1)
        assert call.running.done().code == 0
        assert (real.base / "won").exists()
        assert call.entry(1).state == "won"

    def test_words_arrive_a_line_each_and_cannot_be_written_by_the_candidate(
        self, real: Mounted, logs: Path
    ) -> None:
        waits = (
            'echo x >>"$BRANCHING_STEER" || echo refused; '
            'until [ "$(wc -l <"$BRANCHING_STEER")" = 2 ]; do sleep 0.02; done; '
            'cat "$BRANCHING_STEER"'
        )
        call = Call(real.root, logs, waits)
        call.ask("tell", "try\nthe cache")
        call.ask("tell", "or not")
        assert call.running.done().code == 0
        assert call.output().endswith("refused\ntry the cache\nor not\n")

    def test_a_branch_that_is_kept_during_a_call_survives_the_call(
        self, real: Mounted, logs: Path
    ) -> None:
        call = Call(real.root, logs, f"touch worth-it; {COUNTING}")
        until(call.output, "it has begun")
        call.ask("keep")
        call.ask("stop")
        assert "kept: " + call.entry().branch in call.running.done().out
        until(lambda: branching(real.root, "diff", call.entry().branch).code == 0, "it is there")
        assert branching(real.root, "commit", call.entry().branch).code == 0
        assert (real.base / "worth-it").exists()

    def test_after_the_call_no_control_socket_is_left(self, real: Mounted, logs: Path) -> None:
        call = Call(real.root, logs, COUNTING)
        door = logs / call.entry().door
        assert is_alive(door)
        assert (door.stat().st_mode & 0o077) == 0
        call.ask("stop")
        call.running.done()
        assert not is_alive(door)
        assert not list(logs.glob("*.door"))
        with pytest.raises(BranchError, match="does not answer"):
            send_request(door, "stop", call.entry().branch)

    def test_the_control_socket_of_a_killed_call_is_removed_by_the_next(
        self, real: Mounted, logs: Path
    ) -> None:
        call = Call(real.root, logs, "sleep 600")
        door = logs / call.entry().door
        call.running.process.kill()
        call.running.done()
        until(lambda: not is_alive(door), "nobody is there")
        assert door.exists()
        assert branching(real.root, "speculate", "-c", "true").code == 0
        assert not door.exists()
        with Workspace(real.root) as space:
            for record in space.branches():
                space.reopen(record.name).abort()

    def test_steering_a_function_is_refused(self) -> None:
        with pytest.raises(BranchError, match="function in the calling program"):
            RunController().pause("nobody")


class Sleeper:
    """Stands in for a process."""

    def __init__(self) -> None:
        self.actions: list[str] = []

    def kill(self, grace_seconds: float = 0.0) -> None:
        self.actions.append(f"kill after {grace_seconds}")

    def pause(self, *, is_on: bool = True) -> None:
        self.actions.append(f"pause {is_on}")


class TestHelm:
    def test_too_many_words_are_refused(self, place: Path) -> None:
        controller, words = RunController(), place / "words"
        words.touch()
        with controller.controlling("b", Sleeper(), words):
            controller.tell("b", "x" * (WORDS_BYTES_MAX - 1))
            with pytest.raises(BranchError, match="already"):
                controller.tell("b", "y")
        assert words.stat().st_size == WORDS_BYTES_MAX

    def test_words_never_go_through_a_link(self, place: Path) -> None:
        controller, words, victim = RunController(), place / "words", place / "victim"
        victim.write_text("mine\n")
        words.symlink_to(victim)
        with controller.controlling("b", Sleeper(), words), pytest.raises(OSError, match="words"):
            controller.tell("b", "yours")
        assert victim.read_text() == "mine\n"

    def test_a_command_without_a_message_file_gets_no_message(self) -> None:
        controller = RunController()
        with (
            controller.controlling("b", Sleeper(), None),
            pytest.raises(BranchError, match="without a message file"),
        ):
            controller.tell("b", "x")


class TestDoor:
    @pytest.fixture
    def directory(self, place: Path) -> Iterator[int]:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        yield descriptor
        os.close(descriptor)

    @pytest.fixture
    def opened(self, directory: int) -> Iterator[ControlServer]:
        opened = ControlServer(directory, (os.geteuid(), os.getegid()), RunController())
        yield opened
        opened.close()

    @pytest.mark.parametrize(
        ("line", "error"),
        [
            (b"nonsense\n", "not a request"),
            (b"[]\n", "not a request"),
            (b'{"v": 1}\n', "not a request"),
            (b'{"v": 9, "do": "ping"}\n', "version 9"),
            (b'{"v": 1, "do": "dance"}\n', "not a request"),
            (b'{"v": 1, "do": "pause", "branch": "x"}\n', "cannot be controlled"),
        ],
    )
    def test_a_bad_request_is_answered_with_an_error(
        self, place: Path, opened: ControlServer, line: bytes, error: str
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(SECONDS_MAX)
            client.connect(str(place / opened.name))
            client.sendall(line)
            assert error in json.loads(client.makefile().readline())["error"]
        assert is_alive(place / opened.name)

    def test_a_client_that_disconnects_or_sends_nothing_does_not_block_others(
        self, place: Path, opened: ControlServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control_servers, "ASKING_SECONDS_MAX", 0.2)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(place / opened.name))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(str(place / opened.name))
            send_request(place / opened.name, "ping")

    def test_another_user_is_refused(
        self, place: Path, opened: ControlServer, as_user: tuple[int, int]
    ) -> None:
        (place / opened.name).chmod(0o666)
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(as_user[1])
                os.setuid(as_user[0])
                send_request(place / opened.name, "ping")
            except BranchError as error:
                os._exit(0 if "is not allowed to control" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0

    def test_removing_stale_sockets_leaves_live_ones(
        self, place: Path, opened: ControlServer
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(place / "dead.door"))
        remove_stale(place)
        assert [entry.name for entry in place.glob("*.door")] == [opened.name]
