"""Containers whose start or end was interrupted and that block others. The engine is a fake."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker import warm_container
from branching_docker.engine import Docker, WorkspaceContainer
from branching_docker.errors import EngineError
from branching_docker.plan import plan_warm
from branching_docker.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = Path("/home/me/project")
ONE = WorkspaceContainer(
    identifier="id-of-one", name="one", workspace=str(PLACE), state="running", warm_settings="{}", created=0.0
)


class FakeEngine(Docker):
    """Has one list of containers after another, and then the last one; everything else it is asked fails."""

    def __init__(self, *lists: list[WorkspaceContainer], command: str = "/nowhere/docker") -> None:
        super().__init__(command, "/nowhere/docker.sock")
        self.lists = list(lists)
        self.removed: list[str] = []
        self.refuses_to_remove = False

    def containers(self) -> list[WorkspaceContainer]:
        found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return [one for one in found if one.identifier not in self.removed]

    def remove(self, container: str) -> bool:
        if not self.refuses_to_remove:
            self.removed.append(container)
        return not self.refuses_to_remove


@pytest.fixture(autouse=True)
def short_waits() -> Iterator[None]:
    """Tenths of the seconds that are waited for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BEGIN_SECONDS_MAX", "END_SECONDS_MAX", "GONE_SECONDS_MAX", "FREE_SECONDS_MAX"):
            patch.setattr(warm_container, name, 0.5)
        yield


def asked(engine: FakeEngine) -> tuple[list[WorkspaceContainer], list[str]]:
    """Returns what is at work, and what was said."""
    said: list[str] = []
    return warm_container.active_containers(PLACE, engine, say=said.append), said


@pytest.mark.parametrize("state", ["created", "configured", "initialized"])
@pytest.mark.parametrize("workspace", [PLACE, PLACE / "below", PLACE.parent], ids=["same", "below", "above"])
@pytest.mark.parametrize("settings", ["{}", None], ids=["warm", "run"])
def test_a_container_that_never_started_is_removed(state: str, workspace: Path, settings: str | None) -> None:
    engine = FakeEngine([replace(ONE, state=state, workspace=str(workspace), warm_settings=settings)])
    found, said = asked(engine)
    assert (found, engine.removed) == ([], ["id-of-one"])
    assert said == [
        "removed the container one, which was never started: the process that should have removed it was killed."
    ]


@pytest.mark.parametrize("state", ["exited", "stopped", "dead", "removing"])
def test_a_warm_one_that_has_ended_is_removed(state: str) -> None:
    """Its name would be refused to the next."""
    engine = FakeEngine([replace(ONE, state=state, created=time.time())])
    found, said = asked(engine)
    assert (found, engine.removed) == ([], ["id-of-one"])
    assert said == ["removed the container one, which has ended: the process that should have removed it was killed."]


def test_a_start_and_an_end_are_waited_for() -> None:
    made = replace(ONE, state="created", created=time.time())
    ended = replace(ONE, identifier="other", state="removing", created=time.time())
    engine = FakeEngine([made, ended], [made], [ONE])
    assert asked(engine) == ([ONE], [])
    assert engine.removed == []


def test_a_run_that_is_about_to_end_is_waited_for() -> None:
    run = replace(ONE, warm_settings=None)
    assert asked(FakeEngine([run], [run], [])) == ([], [])
    assert asked(FakeEngine([run])) == ([run], [])


def test_a_directory_with_a_warm_container_waits_for_no_other() -> None:
    below = replace(ONE, warm_settings=None, workspace=str(PLACE / "below"))
    engine = FakeEngine([ONE, below], [])
    assert asked(engine) == ([ONE, below], [])


def test_a_clock_that_is_wrong_delays_no_longer() -> None:
    engine = FakeEngine([replace(ONE, state="created", created=time.time() + 3600)])
    assert asked(engine)[0] == []


def test_other_containers_are_left_alone() -> None:
    elsewhere = replace(ONE, state="created", workspace="/home/me/projects")
    of_a_run = replace(ONE, identifier="run", state="exited", warm_settings=None)
    engine = FakeEngine([elsewhere, of_a_run])
    assert asked(engine) == ([elsewhere], [])
    assert engine.removed == []


def test_a_container_that_cannot_be_removed_is_an_error() -> None:
    engine = FakeEngine([replace(ONE, state="dead")])
    engine.refuses_to_remove = True
    with pytest.raises(EngineError, match="one has stopped, but was not removed"):
        asked(engine)


WARM = plan_warm(workspace=PLACE, settings=Settings())


def started(tmp_path: Path, found: list[WorkspaceContainer], program: str) -> tuple[str, list[str]]:
    """Starts a warm container by an engine whose command is a program; returns its name and what was said."""
    command = tmp_path / "engine"
    command.write_text(f"#!/bin/sh\n{program}")
    command.chmod(0o755)
    said: list[str] = []
    engine = FakeEngine(found, command=str(command))
    return warm_container.up_or_share(WARM, engine, environ={}, say=said.append), said


def test_of_two_that_begin_together_the_second_shares(tmp_path: Path) -> None:
    assert started(tmp_path, [ONE], "echo name is taken >&2; exit 125") == ("one", [])


def test_a_container_that_the_engine_was_still_creating_for_a_dead_process_is_removed(tmp_path: Path) -> None:
    """The first try is refused for its name; the container shows itself then, and is never started."""
    program = f"[ -e {tmp_path}/tried ] && echo ready; >{tmp_path}/tried"
    name, said = started(tmp_path, [replace(ONE, state="created")], program)
    assert (name, len(said)) == (WARM.name, 1)


def test_a_start_that_fails_for_another_reason_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no warm container was started"):
        started(tmp_path, [], f"echo again >>{tmp_path}/tries; exit 125")
    assert (tmp_path / "tries").read_text() == "again\n"
