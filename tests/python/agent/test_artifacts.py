"""The copies of a fork's files that `keep_artifacts` leaves for editors and people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Mounted
from pydantic_ai.messages import ModelMessage, ModelResponse
from support.agents import all_ended, branch_of, coordinator, run, specs, writing

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.pydantic_ai import LiveForkCapability

from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent


def _kept(base: Path) -> list[Path]:
    return sorted((base / ".pydantic-deep" / "forks").glob("*"))


@pytest.mark.parametrize("merges", [True, False], ids=["merge", "abort"])
def test_the_branches_of_a_fork_are_kept_in_the_workspaces_directory(
    real: Mounted, merges: bool
) -> None:
    (real.base / "both.txt").write_text("before\n")

    async def work(workspace: Workspace) -> str:
        scripts = {"a": writing(a="1", both_="x = 1\n"), "b": writing(b="2")}
        made = coordinator(workspace, scripts, keep_artifacts=True)
        handle = await made.fork(specs("a", "b"), parent_history=[{"role": "user", "content": "x"}])
        await all_ended(made)
        if merges:
            await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
        else:
            await made.abort_fork()
        await made.aclose()
        return handle.fork_id

    with Workspace(real.root) as workspace:
        fork_id = run(work(workspace))
        assert workspace.branches() == []
    [kept] = _kept(real.base)
    assert kept.name == fork_id
    assert (kept / "branches/a/a").read_text() == "1"
    assert (kept / "branches/b/b").read_text() == "2"
    states = [
        each["state"] for each in json.loads((kept / "manifest.json").read_text())["branches"]
    ]
    assert states == ["done", "done"]
    assert (real.base / "a").exists() is merges


def test_nothing_is_kept_by_default(real: Mounted) -> None:
    async def work(workspace: Workspace) -> None:
        made = coordinator(workspace, {"a": writing(a="1")})
        await made.fork(specs("a"), parent_history=[{"role": "user", "content": "x"}])
        await all_ended(made)
        await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
        await made.aclose()

    with Workspace(real.root) as workspace:
        run(work(workspace))
    assert _kept(real.base) == []


def test_an_agent_keeps_the_branches_of_its_fork(real: Mounted) -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        told = prompts(messages)[-1]
        if "Merged: " in told:
            return say("end")
        if told == "write":
            if since_prompt(messages) == 0:
                return call("shell", command="echo 1 > a")
            return say("written")
        if not returned(messages, "fork_run"):
            return call("fork_run", specs=[{"label": "one", "steer": "write"}])
        forked = returned(messages, "fork_run")[0]
        branch = forked.splitlines()[1].split()[1]
        return call("merge_or_select", action=f"pick:{branch}")

    with Workspace(real.root) as workspace:
        agent = working_agent(
            model_of(model),
            capabilities=[
                LiveForkCapability(
                    place=workspace,
                    keep_artifacts=True,
                    checkpoint_store=InMemoryCheckpointStore(),
                )
            ],
        )
        run(agent.run("go"))
    [kept] = _kept(real.base)
    assert (kept / "branches/one/a").read_text() == "1\n"
    assert (real.base / "a").read_text() == "1\n"


def test_a_link_in_the_place_of_the_artifacts_is_not_followed(real: Mounted, place: Path) -> None:
    """A branch of an earlier fork may have left it there."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (real.base / ".pydantic-deep").symlink_to(elsewhere)

    async def work(workspace: Workspace) -> None:
        made = coordinator(workspace, {"a": writing(a="1")}, keep_artifacts=True)
        await made.fork(specs("a"), parent_history=[{"role": "user", "content": "x"}])
        await all_ended(made)
        await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
        await made.aclose()

    with (
        Workspace(real.root) as workspace,
        pytest.warns(UserWarning, match=r"mirror of the fork.*symbolic link"),
    ):
        run(work(workspace))
    assert list(elsewhere.iterdir()) == []
    assert (real.base / "a").read_text() == "1"
