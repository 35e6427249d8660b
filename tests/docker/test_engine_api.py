"""The three streams of a command in a container, over the engine's socket: whole, both ways, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import branching_docker
from branching_docker.engine_api import create_exec, to_json, write_frames
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUN_SECONDS = 180


@pytest.fixture(scope="module")
def warm(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a warm container."""
    root = tmp_path_factory.mktemp("attached")
    os.chown(root, 1000, 1000)
    command = [str(WRAPPER), "--image", image, "-w", str(root)]
    subprocess.run([*command, "up"], check=True, stdout=subprocess.DEVNULL, timeout=RUN_SECONDS)
    yield root
    subprocess.run([*command, "down"], check=True, stdout=subprocess.DEVNULL, timeout=RUN_SECONDS)


def inside(
    root: Path, *words: str, options: tuple[str, ...] = (), input_bytes: bytes = b""
) -> tuple[int, bytes, bytes]:
    """Runs words in the container: exit code, standard output, standard error."""
    command = [str(WRAPPER), *options, "-w", str(root), "exec", *words]
    done = subprocess.run(command, input=input_bytes, capture_output=True, timeout=RUN_SECONDS)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def without_docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A docker command that fails: what works with it goes over the socket."""
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 99\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("without_docker")
def test_both_outputs_and_the_exit_code_are_the_commands(warm: Path) -> None:
    assert inside(warm, "sh", "-c", "echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")
    assert inside(warm, "sh", "-c", "kill -KILL $$")[0] == 137


@pytest.mark.usefixtures("without_docker")
def test_large_data_goes_both_ways_concurrently(warm: Path) -> None:
    """A command that writes before it reads, more than any buffer holds."""
    block = os.urandom(1 << 20) * 6
    code, out, _ = inside(warm, "sh", "-c", "head -c 6291456 /dev/zero; cat", input_bytes=block)
    assert code == 0
    assert out == bytes(len(block)) + block


@pytest.mark.usefixtures("without_docker")
def test_a_command_that_does_not_read_is_not_waited_for(warm: Path) -> None:
    assert inside(warm, "true", input_bytes=bytes(1 << 20)) == (0, b"", b"")


@pytest.mark.usefixtures("without_docker")
def test_words_and_variables_arrive_as_they_are(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "taken")
    monkeypatch.delenv("NOT_HERE", raising=False)
    odd = "a\"b\\c\nd\te ü✓ $HOME '"
    options = ("-e", f"ODD={odd}", "-e", "FROM_HERE", "--env", "NOT_HERE")
    program = 'printf "%s|%s|%s|%s" "$1" "$ODD" "$FROM_HERE" "${NOT_HERE-none}"'
    code, out, err = inside(warm, "sh", "-c", program, "sh", odd, options=options)
    assert (code, out.decode(), err) == (0, f"{odd}|{odd}|taken|none", b"")


def test_bytes_that_are_no_text_go_dockers_way(warm: Path) -> None:
    """What JSON cannot say is left to docker, which has its own idea of it; the command runs all the same."""
    assert create_exec("none", [os.fsdecode(b"\xff")], at="/nowhere") is None
    assert inside(warm, "printf", "%s", os.fsdecode(b"a\xffb"))[0] == 0


def test_a_reader_that_goes_ends_the_command(warm: Path) -> None:
    """As in a pipeline: `yes | head`."""
    command = [str(WRAPPER), "-w", str(warm), "exec", "sh", "-c", "exec yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as client:
        assert client.stdout
        assert client.stdout.read(4) == b"y\ny\n"
        client.stdout.close()
        assert client.wait(RUN_SECONDS) == 128 + 13


@pytest.mark.usefixtures("without_docker")
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_streams_that_are_not_there_are_empty_and_silent(warm: Path, closed: tuple[int, ...]) -> None:
    shut = " ".join(f"{stream}{'<' if stream == 0 else '>'}&-" for stream in closed)
    script = f'"$@" {shut}'
    program = "cat; echo out; echo err >&2; exit 5"
    command = ["sh", "-c", script, "sh", str(WRAPPER), "-w", str(warm), "exec", "sh", "-c", program]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=RUN_SECONDS)
    assert done.returncode == 5
    assert done.stdout == (b"" if 1 in closed else b"out\n")
    assert done.stderr == (b"" if 2 in closed else b"err\n")


def test_frames_may_come_in_any_pieces() -> None:
    """Every cut of three frames, one of them empty, gives the same output."""
    frames = b"\1\0\0\0\0\0\0\3one" + b"\2\0\0\0\0\0\0\0" + b"\1\0\0\0\0\0\0\3two"
    for cut in range(len(frames) + 1):
        reading, writing = os.pipe()
        saved = os.dup(1)
        os.dup2(writing, 1)
        try:
            buffer = bytearray(frames[:cut])
            write_frames(buffer, set())
            buffer += frames[cut:]
            write_frames(buffer, set())
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            os.close(writing)
        with os.fdopen(reading, "rb") as said:
            assert (said.read(), bytes(buffer)) == (b"onetwo", b"")


@pytest.mark.parametrize(
    ("text", "expected"), [("", '""'), ('"\\\n\x1f', '"\\u0022\\u005c\\u000a\\u001f"'), ("ü✓", '"ü✓"')]
)
def test_a_text_is_quoted_as_json(text: str, expected: str) -> None:
    assert to_json(text) == expected


HEAVY = {"docker", "typer", "enum", "re", "json", "subprocess", "pathlib", "typing", "socket", "signal", "dataclasses"}


def test_the_short_way_loads_little() -> None:
    """Each of these takes as long to load as the rest of a warm command. Without `site`, which loads what it likes."""
    source = os.path.dirname(os.path.dirname(branching_docker.__file__))  # noqa: PTH120
    modules = ", ".join(
        f"branching_docker.{name}" for name in ("__main__", "fast_path", "docker_context", "engine_api", "warm_exec")
    )
    program = f"import {modules}, sys; print(*sys.modules)"
    told = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert "branching_docker.engine_api" in told.stdout, told.stderr
    assert HEAVY & set(told.stdout.split()) == set()
