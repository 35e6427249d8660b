"""Runs beside open branches of others, which make the directory read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse
from support.branchfs import find_program

from branching import Branch, Workspace

from .scripted import call, returned, say
from .test_live_fork import Deps, Director, agent_of, capability, fork, in_time, pick, spec


@pytest.fixture
def project(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BRANCHFS", find_program())
    project = place / "project"
    project.mkdir()
    (project / "seed.txt").write_text("seed\n")
    return project


@pytest.fixture(params=["fuse", "overlay"])
def workspace(
    project: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    monkeypatch.setenv("BRANCHFS_DRIVER", request.param)
    with Workspace.open(project) as workspace:
        yield workspace
        for record in workspace.branches():
            workspace.reopen(record.name).abort()


def shell(command: str) -> ModelResponse:
    return call("shell", command=command)


def others(workspace: Workspace, name: str = "others") -> Branch:
    """A branch of another process."""
    return workspace.branch(name, on_success=None, on_error=None).__enter__()


def test_a_run_lands_beside_a_branch_that_stays_open(workspace: Workspace) -> None:
    other = others(workspace)

    async def act() -> None:
        first = Director(shell("mkdir new; echo 1 > new/a; cat seed.txt"), say("one"))
        one = await agent_of(first, capability(workspace)).run("first", deps=Deps())
        assert returned(one.all_messages(), "shell")[-1].startswith("seed")
        second = Director(shell("cat new/a > new/b"), say("two"))
        agent = agent_of(second, capability(workspace))
        await agent.run("second", message_history=one.all_messages(), deps=Deps())

    in_time(act())
    assert (workspace.base / "new" / "b").read_text() == "1\n"
    assert [record.name for record in workspace.branches()] == ["others"]
    (other.path / "mine").write_text("mine\n")
    other.commit(rebase=True)
    assert (workspace.base / "mine").read_text() == "mine\n"


def test_a_branch_that_is_opened_during_a_run_does_not_stop_it(workspace: Workspace) -> None:
    opened: list[Branch] = []

    def then(messages: list[ModelMessage]) -> ModelResponse:
        opened.append(others(workspace))
        return shell("cat a > b")

    in_time(
        agent_of(Director(shell("echo 1 > a"), then, say("done")), capability(workspace)).run(
            "go", deps=Deps()
        )
    )
    assert (workspace.base / "b").read_text() == "1\n"
    assert opened[0].is_open


def commits(other: Branch, command: str) -> Callable[[list[ModelMessage]], ModelResponse]:
    """Returns a step in which others commit before the agent's command."""

    def step(messages: list[ModelMessage]) -> ModelResponse:
        other.commit()  # first-winner: the branch that the run works in becomes stale
        return shell(command)

    return step


def test_a_run_goes_on_when_another_branch_is_committed_meanwhile(workspace: Workspace) -> None:
    other, last = others(workspace), others(workspace, "last")
    (other.path / "mine").write_text("mine\n")
    director = Director(shell("echo 1 > a"), commits(other, "cat a mine > b"), say("done"))
    in_time(agent_of(director, capability(workspace)).run("go", deps=Deps()))
    assert (workspace.base / "b").read_text() == "1\nmine\n"
    assert [record.name for record in workspace.branches()] == [last.name]


def test_a_conflict_names_the_paths_and_the_branch_that_keeps_the_work(
    workspace: Workspace,
) -> None:
    other = others(workspace)
    (other.path / "seed.txt").write_text("theirs\n")
    director = Director(shell("echo ours > seed.txt"), commits(other, "echo 2 > b"), say("done"))
    with pytest.warns(UserWarning, match=r"others changed seed.txt") as seen:
        in_time(agent_of(director, capability(workspace)).run("go", deps=Deps()))
    (record,) = workspace.branches()
    assert f"branching diff {record.name}" in str(seen[0].message)
    assert (workspace.base / "seed.txt").read_text() == "theirs\n"
    assert (workspace.base / "b").read_text() == "2\n"
    kept = workspace.reopen(record.name)
    assert [change.path for change in kept.diff()] == ["seed.txt"]
    kept.commit(rebase=True, force=True)
    assert (workspace.base / "seed.txt").read_text() == "ours\n"


def test_a_run_beside_open_branches_forks_and_merges(workspace: Workspace) -> None:
    others(workspace)
    director = Director(
        shell("echo 0 > before"),
        fork(spec("one", "run: cat before > a"), spec("two", "run: echo 2 > a")),
        call("until_done"),
        pick("one"),
        shell("cat a > b"),
        say("done"),
    )
    in_time(agent_of(director, capability(workspace)).run("go", deps=Deps()))
    assert (workspace.base / "b").read_text() == "0\n"
    assert [record.name for record in workspace.branches()] == ["others"]


def test_a_run_beside_open_branches_that_raises_loses_nothing(workspace: Workspace) -> None:
    others(workspace)

    def fail(messages: list[ModelMessage]) -> ModelResponse:
        raise RuntimeError("the model is gone")

    agent = agent_of(Director(shell("echo 1 > a"), fail), capability(workspace))
    with pytest.raises(RuntimeError, match="the model is gone"):
        in_time(agent.run("go", deps=Deps()))
    assert (workspace.base / "a").read_text() == "1\n"
    assert [record.name for record in workspace.branches()] == ["others"]


def test_a_run_in_a_branch_lands_beside_a_child_that_stays_open(workspace: Workspace) -> None:
    outer = others(workspace, "outer")
    child = outer.branch("child", on_success=None, on_error=None).__enter__()
    agent = agent_of(Director(shell("echo 1 > a"), say("done")), capability(outer))
    in_time(agent.run("go", deps=Deps()))
    assert (outer.path / "a").read_text() == "1\n"
    assert [record.name for record in workspace.branches()] == ["outer", "child"]
    child.abort()
