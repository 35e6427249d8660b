"""A conversation goes on: further turns of an agent with `message_history`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter
from support.branchfs import find_program

from branching import Workspace

from .scripted import call, say
from .test_live_fork import Deps, Director, agent_of, capability, fork, in_time, pick, spec


@pytest.fixture
def project(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is mounted on demand, at another path each time."""
    monkeypatch.setenv("BRANCHFS", find_program())
    project = place / "project"
    project.mkdir()
    (project / "seed.txt").write_text("seed\n")
    return project


async def turn(
    project: Path, director: Director, prompt: str, history: list[ModelMessage] | None = None
) -> list[ModelMessage]:
    """Runs one turn as a program of its own does: workspace, capability and agent are new."""
    with Workspace.open(project) as workspace:
        agent = agent_of(director, capability(workspace))
        result = await agent.run(prompt, message_history=history, deps=Deps())
        return result.all_messages()


def shell(command: str) -> Any:
    return call("shell", command=command)


def test_a_second_turn_in_the_same_process_uses_the_workspace(project: Path) -> None:
    async def act() -> None:
        with Workspace.open(project) as workspace:
            director = Director(shell("echo 1 > a"), say("one"), shell("cat a > b"), say("two"))
            agent = agent_of(director, capability(workspace))
            first = await agent.run("first", deps=Deps())
            second = await agent.run("second", message_history=first.all_messages(), deps=Deps())
            assert second.output == "two"

    in_time(act())
    assert (project / "b").read_text() == "1\n"


def test_a_second_turn_in_another_process_uses_the_workspace(project: Path) -> None:
    """The history is stored as JSON, and the directory is mounted at another path."""

    async def act() -> None:
        history = await turn(project, Director(shell("echo 1 > a"), say("one")), "first")
        stored = ModelMessagesTypeAdapter.dump_json(history)
        read = ModelMessagesTypeAdapter.validate_json(stored)
        again = await turn(project, Director(shell("cat a > b"), say("two")), "second", read)
        third = Director(shell("cat b > c"), say("three"))
        await turn(project, third, "third", again)

    in_time(act())
    assert (project / "c").read_text() == "1\n"


def test_a_turn_after_a_merge_goes_on_with_the_winner(project: Path) -> None:
    async def act() -> None:
        director = Director(
            shell("echo 0 > before"),
            fork(spec("one", "run: echo 1 > a"), spec("two", "run: echo 2 > a")),
            call("until_done"),
            pick("two"),
            say("merged"),
        )
        history = await turn(project, director, "first")
        again = await turn(project, Director(shell("cat a > b"), say("two")), "second", history)
        await turn(project, Director(shell("cat b > c"), say("three")), "third", again)

    in_time(act())
    assert (project / "c").read_text() == "2\n"


def test_a_turn_with_a_fork_left_open_finds_the_fork_and_can_merge_it(project: Path) -> None:
    async def act() -> None:
        with Workspace.open(project) as workspace:
            director = Director(
                shell("echo 0 > before"),
                fork(spec("one", "run: echo 1 > a")),
                call("until_done"),
                say("later"),
                shell("echo parent > p"),
                pick("one"),
                shell("cat a > b"),
                say("merged"),
            )
            agent = agent_of(director, capability(workspace))
            first = await agent.run("first", deps=Deps(), conversation_id="c")
            second = await agent.run(
                "second", message_history=first.all_messages(), deps=Deps(), conversation_id="c"
            )
            assert second.output == "merged"

    in_time(act())
    assert (project / "b").read_text() == "1\n"
