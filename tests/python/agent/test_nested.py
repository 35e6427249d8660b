"""Forks within forks, and many concurrent branches."""

from __future__ import annotations

import pytest
from conftest import Mounted
from support.agents import (
    Runners,
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    forever,
    run,
    runner_of,
    specs,
    writing,
)

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkDepthLimitError
from branching.agent.types import BranchSpec

PARENT = [{"role": "user", "content": "hi"}]
SEED = "seed.txt"


def inner_of(outer: ForkCoordinator, runner: ScriptedRunner, **scripts: object) -> ForkCoordinator:
    return outer.nested(
        runner.branch.id,
        runner=Runners(scripts),  # type: ignore[arg-type]
        checkpoint_store=InMemoryCheckpointStore(),
    )


@pytest.mark.contract("F11")
def test_an_inner_winner_reaches_the_outer_branch_and_then_the_parent(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:

            async def forks(runner: ScriptedRunner) -> None:
                runner.write("before", "outer")
                inner = inner_of(
                    made, runner, x=writing(inner="x", **{SEED: "x\n"}), y=writing(y="y")
                )
                await inner.fork(specs("x", "y"), parent_history=runner.messages)
                await all_ended(inner)
                x = branch_of(inner, "x")
                assert x.overlay is not None
                assert x.overlay.read("before") == "outer"
                assert x.lineage.split()[0] == f"{made.fork_id}/{runner.branch.id}"
                assert inner.parent_path is not None
                (inner.parent_path / "during").write_text("outer")
                merged = await inner.merge_or_select(f"pick:{x.id}")
                runner.messages = merged.history_after_merge
                assert inner.parent_path == runner.branch.path
                runner.write("after", "outer")
                await runner.say("forked")

            made = coordinator(workspace, {"a": forks, "b": writing(b="b")})
            await made.fork(specs("a", "b"), parent_history=PARENT)
            await all_ended(made)
            a = branch_of(made, "a")
            assert a.status.error is None
            assert not (real.root / "inner").exists()  # not past the outer branch
            merged = await made.merge_or_select(f"pick:{a.id}")
            assert merged.applied_paths == ("after", "before", "during", "inner", SEED)
            said = [message["content"] for message in merged.history_after_merge]
            assert said == ["hi", "go a", "go x", "done", "forked"]
            assert workspace.branches() == []
            await made.aclose()

    run(work())
    assert (real.base / SEED).read_text() == "x\n"


@pytest.mark.contract("F12")
def test_max_depth_limits_nested_forks(real: Mounted) -> None:
    """A max_depth of 2 allows one fork inside a fork."""

    async def work() -> None:
        with Workspace(real.root) as workspace:

            async def inner_forks(runner: ScriptedRunner) -> None:
                deepest = inner_of(inners[0], runner, z=forever)
                with pytest.raises(ForkDepthLimitError):
                    await deepest.fork(specs("z"))
                await runner.say("deep enough")

            inners: list[ForkCoordinator] = []

            async def forks(runner: ScriptedRunner) -> None:
                inners.append(inner_of(made, runner, x=inner_forks))
                await inners[0].fork(specs("x"), parent_history=PARENT)
                await all_ended(inners[0])
                assert branch_of(inners[0], "x").status.error is None
                await inners[0].merge_or_select(f"pick:{branch_of(inners[0], 'x').id}")
                await runner.say("done")

            made = coordinator(workspace, {"a": forks})
            await made.fork(specs("a"), parent_history=PARENT)
            await all_ended(made)
            assert branch_of(made, "a").status.error is None
            await made.aclose()

    run(work())


def test_an_outer_merge_ends_forks_that_are_still_open_within(real: Mounted) -> None:
    """The branch's own changes are merged; those of the undecided fork are not."""

    async def work() -> None:
        with Workspace(real.root) as workspace:

            async def forks(runner: ScriptedRunner) -> None:
                inner = inner_of(made, runner, x=forever)
                await inner.fork(specs("x"), parent_history=PARENT)
                assert inner.parent_path is not None
                (inner.parent_path / "own").write_text("x")
                await runner.say("left open")

            made = coordinator(workspace, {"a": forks})
            await made.fork(specs("a"), parent_history=PARENT)
            await all_ended(made)
            a = branch_of(made, "a")
            assert a.status.error is None
            assert a.inner is not None
            assert not a.inner.is_resolved
            assert (await made.merge_or_select(f"pick:{a.id}")).applied_paths == ("own",)
            assert a.inner.is_resolved
            assert workspace.branches() == []
            await made.aclose()

    run(work())


def test_an_inner_fork_is_paid_by_the_branch_around_it() -> None:
    async def work() -> None:
        async def spends(runner: ScriptedRunner) -> None:
            for _ in range(9):
                await runner.say("spent", usd=0.2)

        async def forks(runner: ScriptedRunner) -> None:
            inner = inner_of(made, runner, x=spends)
            await inner.fork(specs("x"))
            await all_ended(inner)
            assert branch_of(inner, "x").status.state == "budget_exhausted"
            assert inner.fork_cost().aggregate_usd == pytest.approx(0.4)
            await runner.say("one more", usd=0.2)

        made = coordinator(None, {"a": forks})
        await made.fork([BranchSpec("a", "go", budget_usd=0.5)])
        await all_ended(made)
        assert branch_of(made, "a").status.state == "budget_exhausted"
        assert made.fork_cost().aggregate_usd == pytest.approx(0.4)
        await made.aclose()

    run(work())


def test_fifty_concurrent_branches(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            labels = [f"b{number}" for number in range(50)]

            async def script(runner: ScriptedRunner) -> None:
                label = runner.branch.spec.label
                for number in range(5):
                    runner.write(f"{label}/{number}", label)
                    await runner.say(f"wrote {number}", usd=0.01)
                runner.write(SEED, label)

            made = coordinator(workspace, dict.fromkeys(labels, script), max_branches=50)
            await made.fork(specs(*labels), parent_history=PARENT)
            await all_ended(made)
            assert {branch.state for branch in made.inspect_branches()} == {"done"}
            report = await made.diff_branches()
            assert report.summary.total_paths_touched == 251
            assert report.summary.split_paths == 1
            assert set(report.summary.per_branch_unique.values()) == {5}
            assert made.fork_cost().aggregate_usd == pytest.approx(2.5)
            merged = await made.merge_or_select(f"pick:{branch_of(made, 'b31').id}")
            assert len(merged.applied_paths) == 6
            assert len(merged.discarded_branches) == 49
            assert runner_of(made, "b31").messages == merged.history_after_merge
            assert workspace.branches() == []
            await made.aclose()

    run(work())
    assert (real.base / SEED).read_text() == "b31"
    assert sorted(path.name for path in real.base.iterdir() if path.name[0] != ".") == ["b31", SEED]
