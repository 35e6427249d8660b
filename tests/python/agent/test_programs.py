"""Programs as branches of a fork: what they may spend, and how they are stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Mounted
from support.agents import all_ended, branch_of, run, until

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.command import CommandRunner, usage_in
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.types import BranchSpec, Budget, Usage


def forked(workspace: Workspace) -> ForkCoordinator:
    """A coordinator whose branches run their prompts by the shell."""
    return ForkCoordinator(
        runner=lambda branch: CommandRunner(branch, branch.spec.steer),
        place=workspace,
        checkpoint_store=InMemoryCheckpointStore(),
    )


def tells(**used: float) -> str:
    """A line of shell that reports one request."""
    text = ", ".join(f'"{name}": {value}' for name, value in used.items())
    return f"echo '{{{text}}}' >&3; "


ENDLESS = "echo begun; sleep 3600"


@pytest.mark.contract("E1")
@pytest.mark.parametrize(
    ("budget", "script", "told"),
    [
        (Budget(usd=0.5), tells(usd=0.3) * 2 + ENDLESS, "spent $0.6000 of its budget of $0.5000"),
        (Budget(tokens=10), tells(tokens=11), "has spent 11 of its budget of 10 tokens"),
        (Budget(requests=2), tells() * 3 + ENDLESS, "has spent 3 of its budget of 2 requests"),
        (Budget(requests=2), tells(requests=3), "has spent 3 of its budget of 2 requests"),
        (Budget(usd=0.5), tells(tokens=3) + ENDLESS, "the price of a request was not reported"),
    ],
    ids=["usd", "tokens", "requests", "one line for many", "no price"],
)  # fmt: skip
def test_a_program_that_reports_too_much_usage_is_stopped(
    real: Mounted, budget: Budget, script: str, told: str
) -> None:
    """Its reported usage exceeds its budget. Its siblings continue."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            await made.fork(
                [BranchSpec("a", script, budget=budget), BranchSpec("b", tells(usd=9.0))]
            )
            await all_ended(made)
            a, b = branch_of(made, "a"), branch_of(made, "b")
            assert a.status.state == "budget_exhausted"
            assert told in (a.status.error or "")
            assert b.status.state == "done"
            assert b.cost_tracker == Usage(usd=9.0, requests=1)
            assert a.partial_history, "it can win all the same"
            await made.aclose()

    run(work())


@pytest.mark.contract("E2")
def test_the_sum_of_reported_usage_stops_all_programs(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            script = tells(usd=0.4) + ENDLESS
            specs = [BranchSpec(label, script) for label in "abc"]
            await made.fork(specs, aggregate_budget=Budget(usd=1.0))
            await all_ended(made)
            states = {branch.status.state for branch in made.branches.values()}
            assert states == {"aggregate_budget_exhausted"}
            assert made.fork_cost().aggregate_usd == pytest.approx(1.2)
            await made.aclose()

    run(work())


def test_one_that_keeps_to_its_budget_is_done_and_knows_it(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            script = (
                tells(usd=0.5, tokens=7) + "echo $BRANCHING_BUDGET_USD $BRANCHING_BUDGET_TOKENS"
            )
            await made.fork([BranchSpec("a", script, budget=Budget(usd=0.5, tokens=7))])
            await all_ended(made)
            branch = branch_of(made, "a")
            assert branch.status.error is None
            assert branch.final_message == "0.5 7\n"
            await made.aclose()

    run(work())


@pytest.mark.parametrize("is_groups", [False, True])
def test_a_budget_is_not_kept_without_a_usage_report(real: Mounted, is_groups: bool) -> None:
    """Without such a budget no usage has to be reported."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            each, group = (None, 5) if is_groups else (5, None)
            spec = BranchSpec("a", "echo hello", budget=Budget(tokens=each))
            await made.fork([spec], aggregate_budget=Budget(tokens=group))
            await all_ended(made)
            branch = branch_of(made, "a")
            assert branch.status.state == "failed"
            assert "reported no usage on file descriptor 3" in (branch.status.error or "")
            await made.aclose()

    run(work())


def test_an_invalid_usage_report_is_shown_and_not_counted(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            await made.fork([BranchSpec("a", "echo 0.7 >&3; printf '{\"tokens\": 4}' >&3")])
            await all_ended(made)
            branch = branch_of(made, "a")
            assert "file descriptor 3 is for usage reports" in branch.final_message
            assert branch.cost_tracker == Usage(usd=None, tokens=4, requests=1)
            await made.aclose()

    run(work())


@pytest.mark.parametrize(
    ("line", "used"),
    [
        ('{"usd": 0.25, "tokens": 3}', Usage(usd=0.25, tokens=3, requests=1)),
        ('{"requests": 4}', Usage(usd=None, requests=4)),
        ("{}", Usage(usd=None, requests=1)),
        ('{"usd": 0}', Usage(usd=0.0, requests=1)),
    ],
)
def test_a_line_of_usage(line: str, used: Usage) -> None:
    assert usage_in(line) == used


@pytest.mark.parametrize(
    "line",
    ["", "3", "[]", '{"cost": 1}', '{"usd": "1"}', '{"usd": -1}', '{"usd": NaN}', '{"tokens": 1.5}',
     '{"usd": Infinity}', '{"requests": true}'],
)  # fmt: skip
def test_a_line_that_is_none(line: str) -> None:
    with pytest.raises(ValueError, match=r"a line is like|must be a number of 0 or more"):
        usage_in(line)


@pytest.mark.contract("D7")
def test_a_stopped_program_can_clean_up_and_its_output_is_kept(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            script = "trap 'echo tidied; exit' TERM; echo begun; touch begun; sleep 3600 & wait"
            await made.fork([BranchSpec("a", script)])
            branch = branch_of(made, "a")
            assert branch.path is not None
            await until((branch.path / "begun").exists)
            await made.terminate_branch(branch.id)
            assert branch.status.state == "terminated"
            assert branch.partial_history is not None
            lines = branch.partial_history[-1]["content"].split("\n")
            # The shell may see the end of sleep first, and say "Terminated".
            assert [lines[0], *lines[-2:]] == ["begun", "tidied", ""], lines
            with pytest.raises(ForkStateError, match="is terminated"):
                made.steer(branch.id, "hello")
            merged = await made.merge_or_select(f"pick:{branch.id}")
            assert merged.applied_paths == ("begun",)
            await made.aclose()

    run(work())


def test_one_that_was_cut_off_runs_again_from_the_start(real: Mounted) -> None:
    """It starts from the files of the fork; its earlier usage still counts."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = forked(workspace)
            script = tells(usd=0.2) + "ls; touch half; [ -e go ] || sleep 3600"
            await made.fork([BranchSpec("a", script, budget=Budget(usd=0.5))])
            branch = branch_of(made, "a")
            await until(lambda: branch.path is not None and (branch.path / "half").exists())
            await made.terminate_branch(branch.id)
            Path(real.base / "go").touch()  # seen through the branch, for nobody has touched it
            await (await made.run_again(branch.id))
            assert branch.status.state == "done", branch.status.error
            assert branch.final_message == "go\nseed.txt\n"
            assert [message["role"] for message in branch.history] == ["user", "assistant"]
            assert branch.cost_tracker.usd == pytest.approx(0.4)
            with pytest.raises(ForkStateError, match="is done"):
                await made.run_again(branch.id)
            merged = await made.merge_or_select(f"pick:{branch.id}")
            assert merged.applied_paths == ("half",)
            await made.aclose()

    run(work())
