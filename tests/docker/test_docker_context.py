"""Which engine is meant, from the same files and variables as the docker command reads, and compared with it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from branching_docker.docker_context import find_socket
from branching_docker.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

CONTEXTS = {
    "rootless": "unix:///run/user/1000/docker.sock",
    "colima": "unix:///home/me/.colima/default/docker.sock",
    "desktop-linux": "unix:///home/me/.docker/run/docker.sock",
    "far": "ssh://me@far",
}
DEFAULT = "/var/run/docker.sock"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home directory in which docker knows several contexts."""
    for name, host in CONTEXTS.items():
        directory = tmp_path / ".docker" / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
        directory.mkdir(parents=True)
        described = {"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}
        (directory / "meta.json").write_text(json.dumps(described))
    return tmp_path


CASES = [
    ({}, None, DEFAULT),
    ({}, "", DEFAULT),
    ({}, "default", DEFAULT),
    ({}, "rootless", "/run/user/1000/docker.sock"),
    ({}, "far", "far"),
    ({"DOCKER_CONTEXT": "colima"}, "rootless", "/home/me/.colima/default/docker.sock"),
    ({"DOCKER_CONTEXT": "default"}, "rootless", DEFAULT),
    ({"DOCKER_CONTEXT": "desktop-linux"}, None, "/home/me/.docker/run/docker.sock"),
    ({"DOCKER_HOST": "unix:///x.sock"}, "far", "/x.sock"),
    ({"DOCKER_HOST": "unix://"}, "far", DEFAULT),
    ({"DOCKER_HOST": "unix:///x.sock", "DOCKER_CONTEXT": "far"}, "far", "/x.sock"),
    ({"DOCKER_HOST": "tcp://192.0.2.1:2375"}, None, "tcp://192.0.2.1:2375"),
    ({"DOCKER_HOST": "ssh://me@far"}, "rootless", "ssh://me@far"),
    ({"DOCKER_CONTEXT": "unheard-of"}, None, "unheard-of"),
    ({}, "unheard-of", "unheard-of"),
]


@pytest.mark.parametrize(("environ", "current", "expected"), CASES)
def test_the_engine_is_the_one_that_docker_would_use(
    home: Path, environ: dict[str, str], current: str | None, expected: str
) -> None:
    if current is not None:
        (home / ".docker" / "config.json").write_text(json.dumps({"currentContext": current}))
    surroundings = {"HOME": str(home), **environ}
    asked = subprocess.run(
        ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], **surroundings},
    )
    if expected.startswith("/"):
        assert find_socket(surroundings) == expected
        assert asked.stdout.strip() == f"unix://{expected}"
    else:
        with pytest.raises(EngineError, match=expected):
            find_socket(surroundings)
        assert not asked.stdout.startswith("unix://")


@pytest.mark.parametrize("content", ["{", "[]", '{"currentContext": null}', "\x00"])
def test_a_damaged_configuration_means_the_default(home: Path, content: str) -> None:
    (home / ".docker" / "config.json").write_text(content)
    assert find_socket({"HOME": str(home)}) == DEFAULT


def test_another_configuration_directory_is_heard(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (home / ".docker").rename(elsewhere / "d")
    (elsewhere / "d" / "config.json").write_text('{"currentContext": "rootless"}')
    assert find_socket({"HOME": str(home), "DOCKER_CONFIG": str(elsewhere / "d")}) == "/run/user/1000/docker.sock"
