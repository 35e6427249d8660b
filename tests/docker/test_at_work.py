"""What stands in the way and works on nothing: containers whose start or end was cut short. The engine is a fake."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker import warm
from branching_docker.engine import Found
from branching_docker.errors import EngineError
from branching_docker.facts import EngineFacts
from branching_docker.plan import plan_warm
from branching_docker.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

PLACE = Path("/home/me/project")
ONE = Found(identifier="id-of-one", name="one", workspace=str(PLACE), state="running", warm_settings="{}", made=0.0)


class Engine:
    """Has what it is told to have, one list after another and then the last; its command notes what is removed."""

    socket_path: str | None = None

    def __init__(self, place: Path, *lists: list[Found]) -> None:
        self.lists = list(lists)
        self.removed = place / "removed"
        self.command = str(place / "engine")
        Path(self.command).write_text(f'#!/bin/sh\n[ "$1" = rm ] && echo "$2" >>{self.removed}; exit 0\n')
        Path(self.command).chmod(0o755)

    def facts(self) -> EngineFacts:
        return EngineFacts()

    def containers(self) -> list[Found]:
        gone = self.removed.read_text().split() if self.removed.exists() else []
        found = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return [one for one in found if one.identifier not in gone]

    def image_labels(self, image: str) -> dict[str, str] | None:
        raise AssertionError(image)

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        raise AssertionError(volume)

    def drop_superseded(self, image: str) -> None:
        raise AssertionError(image)


@pytest.fixture(autouse=True)
def short_waits() -> Iterator[None]:
    """Tenths of the seconds that are waited for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BEGIN_SECONDS_MAX", "END_SECONDS_MAX", "GONE_SECONDS_MAX", "FREE_SECONDS_MAX"):
            patch.setattr(warm, name, 0.5)
        yield


def asked(engine: Engine) -> tuple[list[Found], list[str]]:
    """Returns what is at work, and what was said."""
    said: list[str] = []
    return warm.at_work(PLACE, engine, environ={}, say=said.append), said


@pytest.mark.parametrize("state", ["created", "configured", "initialized"])
@pytest.mark.parametrize("workspace", [PLACE, PLACE / "below", PLACE.parent], ids=["same", "below", "above"])
@pytest.mark.parametrize("settings", ["{}", None], ids=["warm", "run"])
def test_what_never_started_is_removed(tmp_path: Path, state: str, workspace: Path, settings: str | None) -> None:
    engine = Engine(tmp_path, [replace(ONE, state=state, workspace=str(workspace), warm_settings=settings)])
    found, said = asked(engine)
    assert (found, engine.removed.read_text()) == ([], "id-of-one\n")
    assert said == ["removed the container one, which was never started: what should have done it was killed."]


@pytest.mark.parametrize("state", ["exited", "stopped", "dead", "removing"])
def test_a_warm_one_that_has_ended_is_removed(tmp_path: Path, state: str) -> None:
    """Its name would be refused to the next."""
    engine = Engine(tmp_path, [replace(ONE, state=state, made=time.time())])
    found, said = asked(engine)
    assert (found, engine.removed.read_text()) == ([], "id-of-one\n")
    assert said == ["removed the container one, which has ended: what should have done it was killed."]


def test_a_start_and_an_end_are_waited_for(tmp_path: Path) -> None:
    made = replace(ONE, state="created", made=time.time())
    ended = replace(ONE, identifier="other", state="removing", made=time.time())
    engine = Engine(tmp_path, [made, ended], [made], [ONE])
    assert asked(engine) == ([ONE], [])
    assert not engine.removed.exists()


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path: Path) -> None:
    run = replace(ONE, warm_settings=None)
    assert asked(Engine(tmp_path, [run], [run], [])) == ([], [])
    assert asked(Engine(tmp_path, [run])) == ([run], [])


def test_what_has_a_warm_container_waits_for_nothing(tmp_path: Path) -> None:
    below = replace(ONE, warm_settings=None, workspace=str(PLACE / "below"))
    engine = Engine(tmp_path, [ONE, below], [])
    assert asked(engine) == ([ONE, below], [])


def test_a_clock_that_is_wrong_delays_no_longer(tmp_path: Path) -> None:
    engine = Engine(tmp_path, [replace(ONE, state="created", made=time.time() + 3600)])
    assert asked(engine)[0] == []


def test_what_is_not_in_the_way_is_let_be(tmp_path: Path) -> None:
    elsewhere = replace(ONE, state="created", workspace="/home/me/projects")
    of_a_run = replace(ONE, identifier="run", state="exited", warm_settings=None)
    engine = Engine(tmp_path, [elsewhere, of_a_run])
    assert asked(engine) == ([elsewhere], [])
    assert not engine.removed.exists()


def test_what_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    engine = Engine(tmp_path, [replace(ONE, state="dead")])
    Path(engine.command).write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(EngineError, match="one does not run, but is not removed"):
        asked(engine)


WARM = plan_warm(workspace=PLACE, settings=Settings())


def started(engine: Engine, program: str) -> tuple[str, list[str]]:
    """Starts a warm container by an engine whose `run` is a program; returns its name and what was said."""
    Path(engine.command).write_text(
        f'#!/bin/sh\n[ "$1" = run ] || {{ echo "$2" >>{engine.removed}; exit 0; }}\n{program}'
    )
    said: list[str] = []
    return warm.up_or_share(WARM, engine, environ={}, say=said.append), said


def test_of_two_that_begin_at_once_the_second_shares(tmp_path: Path) -> None:
    assert started(Engine(tmp_path, [ONE]), "echo name is taken >&2; exit 125") == ("one", [])


def test_what_an_engine_was_still_making_for_the_dead_goes(tmp_path: Path) -> None:
    """The first try is refused for its name; the container shows itself then, and is never started."""
    engine = Engine(tmp_path, [replace(ONE, state="created")])
    name, said = started(engine, f"[ -e {engine.removed} ] && echo ready")
    assert (name, len(said)) == (WARM.name, 1)


def test_what_fails_for_another_reason_fails_once(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no warm container was started"):
        started(Engine(tmp_path, []), f"echo again >>{tmp_path}/tries; exit 125")
    assert (tmp_path / "tries").read_text() == "again\n"
