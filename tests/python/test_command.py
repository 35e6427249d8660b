"""The process layer: a command runs, ends, or is killed together with its group."""

from __future__ import annotations

import os
import pwd
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from branching.errors import ForkError
from branching.process import Command, Ended, Owner
from branching.process.pipes import SCORE_BYTES_MAX

ENVIRONMENT = {"PATH": os.environ["PATH"]}


def sh(text: str, cwd: Path, **options: Any) -> Command:
    return Command(["/bin/sh", "-c", text], cwd=cwd, environment=ENVIRONMENT, **options)


def output_of(text: str, cwd: Path, **options: Any) -> bytes:
    heard: list[bytes] = []
    sh(text, cwd, stdout=heard.append, stderr=heard.append, **options).run()
    return b"".join(heard)


def in_thread(command: Command) -> tuple[threading.Thread, list[Ended]]:
    ends: list[Ended] = []
    thread = threading.Thread(target=lambda: ends.append(command.run()))
    thread.start()
    return thread, ends


def wait_for(condition: Callable[[], bool], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.contract("6.11")
@pytest.mark.parametrize(
    ("text", "code", "how", "reason"),
    [
        ("true", 0, "exit", "exit 0"),
        ("exit 7", 7, "exit", "exit 7"),
        ("kill -9 $$", 137, "signal", "killed by SIGKILL"),
        ("kill -INT $$", 130, "signal", "killed by SIGINT"),
        ("kill -40 $$", 168, "signal", "killed by signal 40"),
    ],
)
def test_the_exit_code_is_the_shells(
    tmp_path: Path, text: str, code: int, how: str, reason: str
) -> None:
    ended = sh(text, tmp_path).run()
    assert (ended.exit_code, ended.how, ended.reason) == (code, how, reason)
    assert ended.success == (code == 0)


@pytest.mark.contract("6.11")
def test_a_program_that_is_not_there_ends_with_127(tmp_path: Path) -> None:
    ended = Command(["no-such-program"], cwd=tmp_path, environment=ENVIRONMENT).run()
    assert (ended.exit_code, ended.how) == (127, "error")
    assert ended.reason.startswith("no-such-program: not found")


@pytest.mark.contract("6.11")
@pytest.mark.parametrize(
    ("content", "mode"), [("#!/bin/sh\n", 0o644), ("neither script nor ELF", 0o755)]
)
def test_a_program_that_cannot_be_executed_ends_with_126(
    tmp_path: Path, content: str, mode: int
) -> None:
    program = tmp_path / "program"
    program.write_text(content)
    program.chmod(mode)
    ended = Command(["./program"], cwd=tmp_path, environment=ENVIRONMENT).run()
    assert (ended.exit_code, ended.how) == (126, "error")
    assert ended.reason.startswith("./program: ")


@pytest.mark.contract("3.11")
def test_a_missing_directory_is_a_failure_of_branching_and_not_of_the_program(
    tmp_path: Path,
) -> None:
    with pytest.raises(ForkError, match="nothing ran"):
        sh("true", tmp_path / "gone").run()


def test_an_argument_list_that_is_too_long_ends_with_126(tmp_path: Path) -> None:
    ended = Command(["true", "x" * 200_000], cwd=tmp_path, environment=ENVIRONMENT).run()
    assert ended.exit_code == 126
    assert "too long" in ended.reason


def test_it_runs_in_the_directory_with_the_environment_given(tmp_path: Path) -> None:
    assert output_of("pwd; echo $PWD; env | sort | head -3", tmp_path).decode().splitlines() == [
        str(tmp_path),
        str(tmp_path),
        f"PATH={ENVIRONMENT['PATH']}",
        f"PWD={tmp_path}",
    ]


def test_a_relative_program_is_looked_for_in_the_directory(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("#!/bin/sh\nexit 5\n")
    (tmp_path / "here").chmod(0o755)
    assert Command(["./here"], cwd=tmp_path, environment=ENVIRONMENT).run().exit_code == 5


def test_both_outputs_into_one_function_keep_their_order(tmp_path: Path) -> None:
    text = "for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done"
    lines = output_of(text, tmp_path).decode().splitlines()
    assert lines == [f"{name} {i}" for i in range(1, 6) for name in ("out", "err")]


def test_outputs_can_go_to_different_places(tmp_path: Path) -> None:
    out: list[bytes] = []
    err: list[bytes] = []
    sh("echo out; echo err >&2", tmp_path, stdout=out.append, stderr=err.append).run()
    assert (b"".join(out), b"".join(err)) == (b"out\n", b"err\n")
    with (tmp_path / "file").open("wb") as file:
        sh("echo out", tmp_path, stdout=file.fileno(), stderr=err.append).run()
    assert (tmp_path / "file").read_text() == "out\n"


def test_a_large_output_arrives_complete(tmp_path: Path) -> None:
    assert len(output_of("head -c 10000000 /dev/zero", tmp_path)) == 10_000_000


def test_standard_input_is_empty(tmp_path: Path) -> None:
    assert output_of("cat; echo end", tmp_path) == b"end\n"


@pytest.mark.contract("6.31")
def test_the_score_is_what_was_written_to_descriptor_3(tmp_path: Path) -> None:
    ended = sh("echo 0.5 >&3; echo text; exit 4", tmp_path, score=True, stdout=2).run()
    assert (ended.score, ended.exit_code) == ("0.5", 4)
    assert sh("true", tmp_path, score=True).run().score == ""
    ended = sh(
        "head -c 100000 /dev/zero | tr '\\0' x >&3; echo end >&3", tmp_path, score=True
    ).run()
    assert len(ended.score) == SCORE_BYTES_MAX - 1
    assert ended.score.endswith("xend")


@pytest.mark.contract("6.11", "6.31")
def test_the_score_wrapper_keeps_arguments_and_exit_codes(tmp_path: Path) -> None:
    def run(*argv: str) -> tuple[Ended, bytes]:
        heard: list[bytes] = []
        command = Command(
            argv, cwd=tmp_path, environment=ENVIRONMENT, score=True, stdout=heard.append
        )
        return command.run(), b"".join(heard)

    assert run("printf", "%s|", "a b", "", "$x", "'")[1] == b"a b||$x|'|"
    assert run("no-such-program")[0].exit_code == 127
    assert run("/etc/passwd")[0].exit_code == 126
    assert run("sh", "-c", "kill -9 $$")[0].exit_code == 137


def test_background_processes_of_the_process_group_are_killed(tmp_path: Path) -> None:
    heard = output_of("sleep 300 & echo $!", tmp_path)
    wait_for(lambda: not is_alive(int(heard)))


def test_an_escaped_writer_does_not_hold_us_up(tmp_path: Path) -> None:
    started = time.monotonic()
    heard = output_of("setsid sh -c 'echo $$; exec sleep 300' & sleep 0.3", tmp_path)
    assert time.monotonic() - started < 60
    os.kill(int(heard), signal.SIGKILL)


def test_kill_sends_sigterm_first(tmp_path: Path) -> None:
    heard: list[bytes] = []
    command = sh(
        "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.01; done",
        tmp_path,
        stdout=heard.append,
    )
    thread, ends = in_thread(command)
    wait_for(lambda: bool(heard))
    command.kill(60)
    thread.join(60)
    assert b"".join(heard) == b"up\nbye\n"
    assert (ends[0].how, ends[0].success) == ("cancelled", False)


def test_kill_ends_a_command_that_ignores_sigterm_after_the_grace(tmp_path: Path) -> None:
    heard: list[bytes] = []
    command = sh("trap '' TERM; echo up; sleep 300; sleep 300", tmp_path, stdout=heard.append)
    thread, ends = in_thread(command)
    wait_for(lambda: bool(heard))
    started = time.monotonic()
    command.kill(0.2)
    thread.join(60)
    assert 0.2 <= time.monotonic() - started < 60
    assert ends[0].exit_code == 137


def test_a_second_kill_can_shorten_the_grace(tmp_path: Path) -> None:
    heard: list[bytes] = []
    command = sh("trap '' TERM; echo up; sleep 300", tmp_path, stdout=heard.append)
    thread, ends = in_thread(command)
    wait_for(lambda: bool(heard))
    command.kill(60)
    command.kill(90)
    command.kill(0)
    thread.join(60)
    assert ends[0].how == "cancelled"


def test_a_stopped_process_is_ended_too(tmp_path: Path) -> None:
    heard: list[bytes] = []
    command = sh("echo up; kill -STOP $$", tmp_path, stdout=heard.append)
    thread, ends = in_thread(command)
    wait_for(lambda: bool(heard))
    command.kill(60)
    thread.join(60)
    assert ends[0].exit_code == 143


def test_killed_before_it_ran_it_never_runs(tmp_path: Path) -> None:
    command = sh("touch ran", tmp_path)
    command.kill()
    assert command.run().how == "cancelled"
    assert not (tmp_path / "ran").exists()
    command.kill()


def test_kill_is_quick(tmp_path: Path) -> None:
    heard: list[bytes] = []
    command = sh("echo up; sleep 300", tmp_path, stdout=heard.append)
    thread, ends = in_thread(command)
    wait_for(lambda: bool(heard))
    started = time.monotonic()
    command.kill(60)
    thread.join(60)
    assert time.monotonic() - started < 50
    assert ends[0].exit_code == 143


def test_a_sink_that_raises_ends_the_command(tmp_path: Path) -> None:
    def sink(_: bytes) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        sh("echo x; sleep 300", tmp_path, stdout=sink).run()


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for _ in range(3):
        output_of("echo x", tmp_path, score=True)
        Command(["no-such-program"], cwd=tmp_path, environment=ENVIRONMENT, score=True).run()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_many_concurrent_ones_do_not_disturb_each_other(tmp_path: Path) -> None:
    ends = [
        in_thread(sh(f"sleep 0.1; echo {n} >&3; exit {n}", tmp_path, score=True)) for n in range(40)
    ]
    for thread, _ in ends:
        thread.join(60)
    assert [(end[0].exit_code, end[0].score) for _, end in ends] == [(n, str(n)) for n in range(40)]


def test_a_command_needs_a_program() -> None:
    with pytest.raises(ValueError, match="at least"):
        Command([], cwd=Path(), environment={})


class TestOwner:
    """Whom commands run as. These tests run as root and become an ordinary user."""

    def test_root_runs_commands_as_the_owner(self, place: Path, as_user: tuple[int, int]) -> None:
        """Design 7: files belong to the workspace's owner, and the home is writable."""
        os.chown(place, *as_user)
        with Owner.of(*as_user) as owner:
            assert owner is not None
            heard = output_of(
                "id -u; id -g; id -G; touch $HOME/x made; echo $USER", place, owner=owner
            )
            assert owner.home.stat().st_uid == as_user[0]
        assert heard.decode().split() == ["12345", "12346", "12346", "12345"]
        assert (place / "made").stat().st_uid == as_user[0]
        assert (place / "made").stat().st_gid == as_user[1]
        assert not owner.home.exists()

    def test_the_owner_can_reopen_its_outputs(self, place: Path, as_user: tuple[int, int]) -> None:
        with Owner.of(*as_user) as owner:
            assert output_of("echo x > /dev/stdout; echo y | tee /dev/stderr", place, owner=owner)
            ended = sh("echo 0.5 | tee /dev/fd/3", place, owner=owner, score=True, stdout=2).run()
        assert ended.score == "0.5"

    def test_a_home_of_its_own_is_used(
        self, place: Path, as_user: tuple[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.chown(place, *as_user)
        entry = pwd.struct_passwd(("ann", "x", *as_user, "", str(place), "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
        with Owner.of(*as_user) as owner:
            assert owner is not None
            assert (owner.name, owner.home) == ("ann", place)
        assert place.exists()

    def test_without_an_owner_the_home_is_the_callers(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/var/tmp/ours")
        assert Owner.home_of(None) == Path("/var/tmp/ours")
        monkeypatch.delenv("HOME")
        assert Owner.home_of(None) is None

    def test_a_workspace_of_roots_is_served_as_root(self) -> None:
        with Owner.of(0, 0) as owner:
            assert owner is None

    def test_an_ordinary_user_keeps_the_user_id(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 77)
        with Owner.of(0, 0) as roots, Owner.of(12345, 12345) as others:
            assert (roots, others) == (None, None)
