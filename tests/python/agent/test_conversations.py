"""A conversation goes on: further turns of an agent with `message_history`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse
from support.branchfs import find_program

from branching import Speculate, Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.pydantic_ai import AgentRunner, MessagesCodec, agent_candidate
from branching.agent.types import BranchSpec

from .scripted import call, returned, say
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
    """Runs one turn with a new workspace, capability and agent, as a new program has them."""
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


def test_a_turn_after_a_merge_continues_with_the_winner(project: Path) -> None:
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


def test_a_run_without_dependencies_finds_the_fork_that_another_run_left_open(
    project: Path,
) -> None:
    """It receives the branches, can write, and can end the fork."""

    async def act() -> None:
        with Workspace.open(project) as workspace:
            director = Director(
                fork(spec("one", "run: echo 1 > a")),
                call("until_done"),
                say("left open"),
                shell("echo parent > p"),
                call("inspect_branches"),
                pick("one"),
                say("merged"),
                shell("echo after > c"),
                say("done"),
            )
            agent = agent_of(director, capability(workspace))
            first = await agent.run("first")
            director.parent = (
                *director.parent[:5],
                lambda _messages: pick("one")(first.all_messages()),
                *director.parent[6:],
            )
            second = await agent.run("second")
            told = returned(second.all_messages(), "inspect_branches")[-1]
            assert "one" in told
            assert returned(second.all_messages(), "shell") == ["[exit 0]"]
            third = await agent.run("third")
            assert returned(third.all_messages(), "shell") == ["[exit 0]"]

    in_time(act())
    assert (project / "a").read_text() == "1\n"
    assert (project / "c").read_text() == "after\n"


def both(*parts: ModelResponse) -> ModelResponse:
    """One answer with the calls of several."""
    return ModelResponse(parts=[part for response in parts for part in response.parts])


@pytest.mark.parametrize("order", [1, -1], ids=["before", "after"])
def test_calls_beside_a_fork_and_beside_a_merge_work(project: Path, order: int) -> None:
    """One answer has calls before and after the one that freezes or replaces the files."""
    loop = "set -e; for i in 1 2 3 4 5; do echo $i >> p{}; sleep 0.05; done"
    slow = [shell(loop.format(n)) for n in (1, 2)]

    async def act() -> None:
        with Workspace.open(project) as workspace:
            begin = fork(spec("one", "run: echo 1 > a"))
            director = Director(
                both(*[begin, slow[0]][::order]),
                call("until_done"),
                lambda messages: both(*[pick("one")(messages), slow[1]][::order]),
                shell("cat a p1 p2 | wc -l"),
                say("merged"),
            )
            agent = agent_of(director, capability(workspace))
            result = await agent.run("first", deps=Deps())
            told = [text for seen in director.seen for text in returned(seen, "shell")]
            assert told
            assert all("[exit 0]" in text for text in told), told
            assert result.output == "merged"

    in_time(act())
    assert (project / "a").read_text() == "1\n"


@pytest.mark.parametrize("path", [".", "./", "x/..", "./.", "..", ""])
def test_the_root_of_a_branch_cannot_be_deleted(project: Path, path: str) -> None:
    (project / "x").mkdir()

    async def act() -> list[str]:
        with Workspace.open(project) as workspace:
            director = Director(
                fork(spec("one", f"delete: {path}")), call("until_done"), pick("one"), say("merged")
            )
            agent = agent_of(director, capability(workspace))
            await agent.run("first", deps=Deps())
            return [text for seen in director.seen for text in returned(seen, "delete_file")]

    told = in_time(act())
    assert told
    assert all("delete_file failed" in text or "failed" in text for text in told)
    assert (project / "seed.txt").read_text() == "seed\n"
    assert (project / "x").is_dir()


def test_branches_of_a_coordinator_and_of_a_pattern_see_the_projects_own_path(
    project: Path,
) -> None:
    """The paths in a virtual environment that a branch creates are then valid after a merge."""

    async def act() -> None:
        with Workspace.open(project) as workspace:
            director = Director()
            agent = agent_of(director)
            coordinator = ForkCoordinator(
                runner=lambda branch: AgentRunner(agent, branch),
                codec=MessagesCodec(),
                place=workspace,
                checkpoint_store=InMemoryCheckpointStore(),
            )
            handle = await coordinator.fork([BranchSpec("one", "run: pwd > of-coordinator")])
            tasks = [branch.task for branch in coordinator.branches.values() if branch.task]
            await asyncio.wait(tasks)
            await coordinator.merge_or_select(f"pick:{handle.branches[0].id}")
            await coordinator.aclose()
            candidate = agent_candidate(agent, "run: pwd > of-pattern")
            found = await asyncio.to_thread(Speculate([candidate]), workspace)
            assert found.committed

    in_time(act())
    for name in ("of-coordinator", "of-pattern"):
        assert (project / name).read_text() == f"{project}\n"
