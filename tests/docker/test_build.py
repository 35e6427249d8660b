"""`branching-docker build` on small trees: what it replaces goes, whatever else is on the machine stays."""

from __future__ import annotations

import secrets
import subprocess
from typing import TYPE_CHECKING

import pytest

from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import docker

    Build = Callable[..., subprocess.CompletedProcess[str]]

BUILD_SECONDS_MAX = 300
# Two stages with the labels of the image's own Dockerfile, from nothing.
DOCKERFILE = """
ARG BRANCHING_NAME=none
FROM scratch AS build
ARG BRANCHING_NAME
COPY content /content
LABEL branching.stage="build" branching.name="${BRANCHING_NAME}"
FROM scratch
ARG BRANCHING_NAME
COPY --from=build /content /content
LABEL branching.stage="image" branching.name="${BRANCHING_NAME}"
"""


@pytest.fixture
def names(engine: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """Two names for images; whatever was built for them is removed at the end."""
    made = (f"branching-test-{secrets.token_hex(4)}", f"branching-test-{secrets.token_hex(4)}")
    yield made
    for name in made:
        for identifier in {*left(engine, name), *left(engine, name, dangling=False)}:
            engine.api.remove_image(identifier, force=True)


def left(client: docker.DockerClient, name: str, *, dangling: bool = True) -> list[str]:
    """Returns the ids of what was built for a name, and has none."""
    filters = {"label": f"branching.name={name}", "dangling": dangling}
    return [str(one["Id"]) for one in client.api.images(filters=filters)]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Builds a tree with some content under a name."""

    def run(name: str, content: str, dockerfile: str = DOCKERFILE) -> subprocess.CompletedProcess[str]:
        (tmp_path / "scripts").mkdir(exist_ok=True)
        (tmp_path / "scripts" / "base-image").write_text("#!/bin/sh\necho scratch\n")
        (tmp_path / "scripts" / "base-image").chmod(0o755)
        (tmp_path / "Dockerfile").write_text(dockerfile)
        (tmp_path / "content").write_text(content)
        command = [str(WRAPPER), "--image", name, "build", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX)

    return run


@pytest.mark.contract("7.9")
def test_a_build_removes_the_image_that_it_replaces_and_no_other(
    build: Build, names: tuple[str, str], engine: docker.DockerClient
) -> None:
    mine, others = names
    for content in ("first", "second"):  # the other's leftovers are made by docker alone, which leaves them
        assert build(others, content).returncode == 0
        engine.images.get(others).tag(f"{others}-kept", content)
    engine.images.remove(others, noprune=True)
    kept = engine.images.get(f"{others}-kept:first").id, engine.images.get(f"{others}-kept:second").id
    before = left(engine, others)
    replaced = []
    for content in ("first", "second", "second", "third"):
        done = build(mine, content)
        assert done.returncode == 0, done.stdout + done.stderr
        replaced.append(engine.images.get(mine).id)
        assert len(left(engine, mine)) <= 1, "more than the newest stage, the builder's cache"
    assert replaced[0] != replaced[1] == replaced[2] != replaced[3]
    assert {one["Id"] for one in engine.api.images(name=mine)} == {replaced[3]}
    assert left(engine, others) == before
    assert (engine.images.get(f"{others}-kept:first").id, engine.images.get(f"{others}-kept:second").id) == kept


def test_a_build_that_fails_replaces_nothing(build: Build, names: tuple[str, str], engine: docker.DockerClient) -> None:
    name = names[0]
    assert build(name, "first").returncode == 0
    before = engine.images.get(name).id
    done = build(name, "second", DOCKERFILE + "COPY nowhere /nowhere\n")
    assert done.returncode == 125
    assert "was not built" in done.stderr
    assert "nothing was replaced" in done.stderr
    assert engine.images.get(name).id == before
