"""The output of `branching run`: its streams, byte by byte, and its log."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import SECONDS_MAX, OnTerminal, Running, branching, branching_argv
from support.waiting import until

from branching.errors import BranchError
from branching.process.pipes import Forward, Pipes
from branching.runlog.control_socket import is_alive, send_request
from branching.runlog.run_log import read_entries

PRINTS = r"printf '\377\000a\r\n'; printf 'err\r' >&2; printf end"


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def logged(root: Path, name: str) -> str:
    return branching(root, "log", name).out


class TestInPipes:
    def test_output_reaches_the_two_streams_unchanged(self, root: Path) -> None:
        done = subprocess.run(
            branching_argv("run", "-q", "-b", "mine", "--", "sh", "-c", PRINTS),
            cwd=root,
            capture_output=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert (done.stdout, done.stderr) == (b"\xff\0a\r\nend", b"err\r")
        assert sorted(logged(root, "mine").splitlines()) == ["end", "err", "\ufffd\0a"]

    def test_one_output_for_both_keeps_the_order(self, root: Path) -> None:
        script = "for i in 1 2 3 4 5 6; do echo out $i; echo err $i >&2; done"
        done = subprocess.run(
            branching_argv("run", "-q", "-b", "mine", "--", "sh", "-c", script),
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        lines = [f"{name} {i}" for i in range(1, 7) for name in ("out", "err")]
        assert done.stdout.splitlines() == lines
        assert logged(root, "mine").splitlines() == lines

    def test_a_large_output_arrives_complete(self, root: Path) -> None:
        size = 3_000_000
        done = branching(root, "run", "-q", "--", "sh", "-c", f"yes | head -c {size}; touch made")
        assert done.out == "y\n" * (size // 2)
        assert (root / "made").exists()

    def test_failed_candidates_are_kept_and_marked_as_failed(self, root: Path) -> None:
        words = ["-q", "-b", "mine", "--", "sh", "-c", "echo why >&2; exit 3"]
        done = branching(root, "run", *words)
        assert (done.code, done.err) == (3, "why\n")
        [entry] = branching(root, "log", "--json", "mine").document["candidates"]
        assert (entry["command"], entry["state"], entry["output"]) == ("run", "failed", "why\n")

    def test_of_one_name_the_last_is_kept(self, root: Path) -> None:
        for word in ("first", "second"):
            assert branching(root, "run", "-b", "mine", "--", "echo", word).code == 0
        assert logged(root, "mine") == "second\n"

    def test_the_setup_is_kept_beside_the_command(self, root: Path) -> None:
        words = ["-b", "mine", "--setup", "echo prepared", "--", "echo", "ran"]
        done = branching(root, "run", "-q", *words)
        assert (done.out, done.err) == ("ran\n", "prepared\n")
        assert logged(root, "mine") == "[-1] prepared\n[0] ran\n"

    def test_a_time_limit_that_expires_in_the_setup_ends_the_call(self, root: Path) -> None:
        words = ["--timeout", "1s", "--setup", "touch made; sleep 60", "--", "true"]
        done = branching(root, "run", *words)
        assert (done.code, "timed out (exit code 124)" in done.err) == (124, True), done.err
        assert [entry.name for entry in root.iterdir()] == [NAME_FROM]

    def test_a_client_of_its_control_socket_is_answered(self, real: Mounted) -> None:
        """The thread for it is started when a client comes."""
        words = ["run", "-b", "mine", "--", "sh", "-c", "echo up >&2; exec sleep 60"]
        run = Running(real.root, words)
        run.wait_for_line("up")
        logs = real.base / ".branching" / "logs"
        [entry] = read_entries(logs)
        assert is_alive(logs / entry.door)
        with pytest.raises(BranchError, match="cannot be controlled"):
            send_request(logs / entry.door, "stop", "mine")
        run.signal(signal.SIGTERM)
        assert run.done().code == 128 + signal.SIGTERM

    def test_the_document_is_alone_on_stdout(self, root: Path) -> None:
        done = branching(root, "run", "--json", "--", "sh", "-c", "echo out; echo err >&2")
        assert done.document["action"] == "committed"
        assert sorted(done.err.splitlines()) == ["err", "out"]

    def test_without_a_log_nothing_is_kept(self, root: Path) -> None:
        done = branching(root, "run", "-q", "--no-log", "--", "echo", "secret")
        assert done.out == "secret\n"
        assert branching(root, "log").out == ""

    def test_a_reader_that_stops_ends_the_command(self, root: Path) -> None:
        words = " ".join(branching_argv("run", "-b", "mine", "--", "sh", "-c", "'touch made; yes'"))
        done = subprocess.run(
            ["bash", "-c", f"{words} | head -1; echo ${{PIPESTATUS[0]}}"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        # Its own code is 141; that nobody hears the last words either is our failure.
        assert done.stdout.splitlines()[0] == "y"
        assert done.stdout.splitlines()[1] in ("141", "125")
        assert [entry.name for entry in root.iterdir()] == [NAME_FROM]

    def test_a_run_whose_output_cannot_be_written_fails_and_is_not_committed(
        self, root: Path
    ) -> None:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                branching_argv("run", "--", "sh", "-c", "touch made; echo x"),
                cwd=root,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=SECONDS_MAX,
                check=False,
            )
        assert (done.returncode, "could not be written: No space left" in done.stderr) == (
            125,
            True,
        )
        assert [entry.name for entry in root.iterdir()] == [NAME_FROM]


class TestOnATerminal:
    def test_output_on_a_terminal_is_logged(self, root: Path) -> None:
        script = "test -t 0 && test -t 1 && test -t 2 && printf 'a\\nb'"
        done = OnTerminal(root, ["run", "-q", "-b", "mine", "--", "sh", "-c", script]).done()
        assert (done.code, done.out) == (0, "a\nb")
        assert logged(root, "mine") == "a\nb\n"

    def test_keys_go_through_and_the_end_of_input_too(self, root: Path) -> None:
        run = OnTerminal(
            root, ["run", "-q", "-b", "mine", "--", "sh", "-c", "echo up; cat; echo e"]
        )
        run.wait_for("up\n")
        run.type("typed\n\x04")
        assert run.done().out == "up\ntyped\ntyped\ne\n"
        assert logged(root, "mine") == "up\ntyped\ntyped\ne\n"

    def test_its_terminal_settings_do_not_change_those_of_the_caller(self, root: Path) -> None:
        run = OnTerminal(
            root, ["run", "-q", "--", "sh", "-c", "echo up; read x; stty -echo; exit 4"]
        )
        before = termios.tcgetattr(run.master)
        run.wait_for("up\n")
        run.type("x\n")
        while not run._has_ended():
            run._read(0.05)
        assert termios.tcgetattr(run.master) == before
        assert run.done().code == 4

    def test_a_new_size_reaches_the_command(self, root: Path) -> None:
        script = "trap 'stty size; exit 5' WINCH; echo up; while :; do sleep 0.05; done"
        run = OnTerminal(root, ["run", "-q", "--", "sh", "-c", script])
        run.wait_for("up\n")
        fcntl.ioctl(run.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        run.wait_for("33 77\n")
        assert run.done().code == 5

    def test_input_from_elsewhere_stays_from_there(self, root: Path) -> None:
        words = " ".join(
            branching_argv("run", "-q", "--", "sh", "-c", "'cat; test -t 1 && echo t'")
        )
        run = OnTerminal(root, ["-c", f"echo piped | {words}"], program=["bash"])
        assert run.done().out == "piped\nt\n"

    def test_in_the_background_it_prints_and_in_front_it_takes_keys(self, root: Path) -> None:
        run = OnTerminal(root, [], program=["bash", "--norc", "--noprofile", "-i"], PS1="in> ")
        run.wait_for("in> ")
        words = " ".join(branching_argv("run", "-q", "-w", f"'{root}'", "--", "sh", "-c"))
        run.type(f"{words} 'echo u''p; read x; echo got $x' &\n")
        run.wait_for("up\n")
        run.type("fg\n")
        run.wait_for("read x; echo got $x'")  # bash repeats the command
        run.type("keys\n")
        run.wait_for("got keys\n")
        run.seen = ""
        run.wait_for("in> ")
        run.type("exit 5\n")
        assert run.done().code == 5

    def test_with_no_log_the_command_gets_the_terminal(self, root: Path) -> None:
        run = OnTerminal(root, ["run", "-q", "--no-log", "--", "sh", "-c", "test -t 1 && echo t"])
        assert run.done().out == "t\n"
        assert branching(root, "log").out == ""


class TestForward:
    """An output that is forwarded by the thread that supervises the command."""

    def test_nothing_is_left_open(self, tmp_path: Path) -> None:
        before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
        kept: list[bytes] = []
        with (tmp_path / "out").open("wb") as out:
            forward = Forward(out.fileno(), kept.append)
            with Pipes({1: forward, 2: forward}, owner=None) as pipes:
                end = pipes.child_end(1)
                assert end is not None
                assert end == pipes.child_end(2)
                os.write(end, b"x\n")
                assert pipes.drain()
        assert (tmp_path / "out").read_bytes() == b"".join(kept) == b"x\n"
        assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

    def test_an_output_that_is_not_read_delays_neither_the_other_nor_the_time_limit(
        self, root: Path
    ) -> None:
        """`yes` fills the pipe at standard output; standard error and --timeout go on."""
        reading, writing = os.pipe()
        script = "echo heard >&2; trap 'echo asked >&2' TERM; yes & wait; wait"
        words = branching_argv("run", "--timeout", "2s", "--", "sh", "-c", script)
        with os.fdopen(reading, "rb") as out:
            run = subprocess.Popen(
                words, cwd=root, stdout=writing, stderr=subprocess.PIPE, text=True
            )
            os.close(writing)
            assert run.stderr is not None
            seen: list[str] = []
            while "timed out" not in "".join(seen):
                line = run.stderr.readline()
                if not seen:
                    assert line == "heard\n"
                seen.append(line)
                if line == "asked\n":
                    while out.read(1 << 16):
                        pass
            assert run.wait(SECONDS_MAX) == 124
            run.stderr.close()

    def test_a_signal_ends_a_command_whose_output_is_not_read(self, root: Path) -> None:
        """The second signal discards the remaining output."""
        reading, writing = os.pipe()
        words = branching_argv("run", "--", "sh", "-c", "echo heard >&2; exec yes")
        run = subprocess.Popen(words, cwd=root, stdout=writing, stderr=subprocess.PIPE, text=True)
        try:
            assert run.stderr is not None
            assert run.stderr.readline() == "heard\n"
            until(lambda: not select.select([], [writing], [], 0)[1], "the pipe is full")
            os.close(writing)
            children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
            run.send_signal(signal.SIGTERM)
            until(lambda: children.read_text() == "", "the command has ended")
            run.send_signal(signal.SIGTERM)
            assert run.wait(SECONDS_MAX) == 128 + signal.SIGTERM
            run.stderr.close()
        finally:
            os.close(reading)
            run.kill()
