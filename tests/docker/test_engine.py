"""Answers and errors of engines: Docker through a fake socket, Podman through a fake command."""

from __future__ import annotations

import json
import socketserver
import subprocess
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

import pytest

from branching_docker.engine import Docker, Podman, show_progress
from branching_docker.errors import EngineError, ImageError
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ANSWERS: dict[str, tuple[int, object]] = {
    "/version": (200, {"ApiVersion": "1.41"}),
    "/v1.41/containers/busy": (409, {"message": "it is running"}),
    "/v1.41/containers/ended": (204, None),
    "/v1.41/info": (500, {"message": "out of order"}),
    "/v1.41/volumes/bare": (200, {"Name": "bare", "Labels": None}),
}
"""By path. Everything else is not found."""


class Handler(BaseHTTPRequestHandler):
    """Gives the answers."""

    def do_GET(self) -> None:
        code, answer = ANSWERS.get(self.path.partition("?")[0], (404, {"message": "no such thing"}))
        body = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with suppress(ConnectionError):  # a client that has read the code may not wait for the rest
            self.end_headers()
            self.wfile.write(body)

    do_DELETE = do_POST = do_GET  # noqa: N815

    def address_string(self) -> str:
        return "a socket"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Keeps quiet."""


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Docker]:
    """Docker, at a socket that gives the answers."""
    path = tmp_path / "s"
    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        engine = Docker("docker", str(path))
        yield engine
        with engine.connected() as client:
            client.close()
        server.shutdown()
        thread.join()


def test_objects_that_docker_does_not_know_are_none(fake: Docker) -> None:
    assert (fake.is_known("gone"), fake.image_labels("gone"), fake.volume_labels("gone")) == (False, None, None)
    assert fake.volume_labels("bare") == {}
    fake.stop("gone")


def test_only_the_call_that_removes_a_container_reports_it(fake: Docker) -> None:
    assert [fake.remove(name) for name in ("ended", "busy", "gone")] == [True, False, False]


def test_a_refusal_of_docker_is_an_error_with_its_reason(fake: Docker) -> None:
    with pytest.raises(EngineError, match="Docker refused a request") as raised:
        fake.info()
    assert raised.value.cause == "out of order"
    with pytest.raises(ImageError, match="could not be pulled") as failed:
        fake.pull("nowhere")
    assert failed.value.cause == "no such thing"


@pytest.mark.parametrize("config", ["[]", '{"proxies": null}', '{"auths": {"x": 3}}'])
def test_a_configuration_of_docker_that_is_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(EngineError, match="Docker's configuration cannot be used"):
        Docker("docker", "/nowhere").info()


def test_the_progress_of_a_build_and_a_pull_is_printed_up_to_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[dict[str, object]] = [
        {"stream": "Step 1/2 : FROM scratch\n"},
        {"aux": {"ID": "sha256:1"}},
        {"status": "Pulling from library/debian", "id": "trixie"},
        {"status": "Downloading", "id": "layer", "progressDetail": {"current": 1, "total": 2}, "progress": "[=> ]"},
        {"status": "Pull complete", "id": "layer", "progressDetail": {}},
    ]
    assert show_progress(parts) is None
    printed = "Step 1/2 : FROM scratch\ntrixie: Pulling from library/debian\nlayer: Pull complete\n"
    assert capsys.readouterr().out == printed
    assert show_progress([{"error": "no space"}, {"stream": "not reached"}]) == "no space"
    assert capsys.readouterr().out == ""


def test_a_pull_that_fails_is_125_and_says_why() -> None:
    done = subprocess.run([WRAPPER, "--image", "127.0.0.1:1/none", "pull"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 125
    assert 'the image "127.0.0.1:1/none" could not be pulled.\nCause: ' in done.stderr
    assert "connection refused" in done.stderr


@pytest.mark.parametrize(
    ("ask", "words", "answer", "expected"),
    [
        (lambda podman: podman.stop("one"), "stop --ignore -t 60 one", "exit 0", None),
        (lambda podman: podman.remove("one"), "rm one", "exit 0", True),
        (lambda podman: podman.remove("one"), "rm one", "exit 2", False),
        (lambda podman: podman.is_known("one"), "container inspect one", "exit 0", True),
        (lambda podman: podman.is_known("one"), "container inspect one", "exit 125", False),
        (lambda podman: podman.volume_labels("one"), "volume inspect one", "exit 125", None),
        (lambda podman: podman.pull("one"), "pull one", "exit 0", None),
    ],
    ids=["stop", "removed", "not removed", "known", "unknown", "no volume", "pull"],
)
def test_podman_is_asked_by_its_command(
    tmp_path: Path, ask: Callable[[Podman], object], words: str, answer: str, expected: object
) -> None:
    assert ask(podman(tmp_path, answer)) == expected
    assert (tmp_path / "asked").read_text() == f"{words}\n"


def test_a_failed_build_by_podman_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="was not built") as raised:
        podman(tmp_path, "exit 3").build(tmp_path, "one", {"A": "1", "B": "2"})
    assert raised.value.cause == "podman build exited with 3"
    asked = f"build --tag one --build-arg A=1 --build-arg B=2 {tmp_path}\n"
    assert (tmp_path / "asked").read_text() == asked


def podman(directory: Path, answer: str) -> Podman:
    """Returns Podman with a command that notes its arguments."""
    command = directory / "podman"
    command.write_text(f'#!/bin/sh\necho "$@" >>{directory}/asked\n{answer}\n')
    command.chmod(0o755)
    return Podman(str(command), {})
