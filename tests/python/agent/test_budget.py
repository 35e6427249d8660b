"""Budgets stop a run before the request that would cross them.

Driven through real runs: a branch stops itself in the middle of its run; no test writes its fields.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from conftest import Mounted
from support.agents import (
    Script,
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    forever,
    run,
    specs,
    until,
)

from branching import Workspace
from branching.agent.budget import Ledger
from branching.agent.coordinator import ForkCoordinator
from branching.agent.cost_estimate import TokenPrice, project_cost
from branching.agent.errors import BudgetExhausted, UnknownPriceError
from branching.agent.project_tests import BranchTester
from branching.agent.types import BranchSpec, Budget, Usage

PARENT = [{"role": "user", "content": "hi"}]


def turns(count: int, usd: float | None = 0.3, tokens: int = 10) -> Script:
    """A run of so many requests."""

    async def script(runner: ScriptedRunner) -> None:
        for number in range(count):
            await runner.say(f"turn {number}", usd=usd, tokens=tokens)

    return script


async def ended(
    *made_specs: BranchSpec, scripts: dict[str, Script], **options: Any
) -> ForkCoordinator:
    made = coordinator(None, scripts)
    await made.fork(list(made_specs), parent_history=PARENT, **options)
    await all_ended(made)
    return made


class TestBranch:
    @pytest.mark.contract("E1", "E3", "E5", "P1")
    def test_a_budget_stops_one_run_and_its_siblings_continue(self) -> None:
        """It stops after request 2 of 6, not after the last; the error names spent money and
        budget."""

        async def work() -> None:
            made = await ended(
                BranchSpec("a", "go", budget_usd=0.5),
                BranchSpec("b", "go"),
                scripts={"a": turns(6), "b": turns(6)},
            )
            a, b = branch_of(made, "a"), branch_of(made, "b")
            assert a.status.state == "budget_exhausted"
            assert a.status.error == (
                f"branch {a.id} has spent $0.3000 of its budget of $0.5000; "
                "the next request takes about $0.3000"
            )
            assert b.status.state == "done"
            costs = made.fork_cost()
            assert [cost.cumulative_usd for cost in costs.per_branch] == [0.3, pytest.approx(1.8)]
            assert costs.per_branch[0].remaining_usd == pytest.approx(0.2)
            assert costs.per_branch[0].budget_usd == 0.5
            assert costs.aggregate_usd == pytest.approx(2.1)
            assert costs.aggregate_budget_usd is None
            await made.aclose()

        run(work())

    @pytest.mark.contract("D11", "E8")
    def test_a_branch_without_budget_left_keeps_its_history_and_can_win(self) -> None:
        """The history ends with the last request that was sent; the refused one is not in it."""

        async def work() -> None:
            made = await ended(BranchSpec("a", "go", budget_usd=0.7), scripts={"a": turns(6)})
            merged = await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
            said = [message["content"] for message in merged.history_after_merge]
            assert said == ["hi", "go", "turn 0"]
            await made.aclose()

        run(work())

    @pytest.mark.parametrize(
        ("budget", "requests"),
        [(Budget(tokens=25), 2), (Budget(requests=3), 3), (Budget(usd=0.6), 2), (Budget(usd=0), 0)],
    )
    def test_other_budgets(self, budget: Budget, requests: int) -> None:
        """By tokens, requests and money, checked before each request."""

        async def work() -> None:
            made = await ended(BranchSpec("a", "go", budget=budget), scripts={"a": turns(9)})
            branch = branch_of(made, "a")
            assert branch.status.state == "budget_exhausted"
            assert branch.cost_tracker.requests == requests
            await made.aclose()

        run(work())

    def test_wall_time(self) -> None:
        async def work() -> None:
            made = await ended(
                BranchSpec("a", "go", budget=Budget(seconds=0.05)),
                scripts={"a": forever},
            )
            status = branch_of(made, "a").status
            assert status.state == "budget_exhausted"
            assert "0.05 seconds" in (status.error or "")
            await made.aclose()

        run(work())

    def test_a_refusal_that_a_framework_has_wrapped_is_still_one(self) -> None:
        async def wraps(runner: ScriptedRunner) -> None:
            try:
                await turns(9)(runner)
            except BudgetExhausted as error:
                raise RuntimeError("the run failed") from error

        async def work() -> None:
            made = await ended(BranchSpec("a", "go", budget_usd=0.3), scripts={"a": wraps})
            assert branch_of(made, "a").status.state == "budget_exhausted"
            await made.aclose()

        run(work())

    @pytest.mark.contract("P2")
    def test_an_unknown_price_refuses_a_budget_in_money(self) -> None:
        """The budget is never silently off."""

        async def work() -> None:
            made = await ended(
                BranchSpec("a", "go", budget_usd=1.0),
                BranchSpec("b", "go"),
                scripts={"a": turns(2, usd=None), "b": turns(2, usd=None)},
            )
            status = branch_of(made, "a").status
            assert status.state == "budget_exhausted"
            assert "price of the model is unknown" in (status.error or "")
            assert branch_of(made, "a").cost_tracker.requests == 0
            assert branch_of(made, "b").status.state == "done"
            assert made.fork_cost().per_branch[1].cumulative_usd is None
            assert made.fork_cost().aggregate_usd == 0.0  # the sum of the known costs
            await made.aclose()

        run(work())

    @pytest.mark.contract("B17", "B18")
    def test_an_unknown_price_can_be_allowed(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": turns(2, usd=None)}, unknown_price="ignore")
            await made.fork([BranchSpec("a", "go", budget_usd=0.1)])
            await all_ended(made)
            [cost] = made.fork_cost().per_branch
            assert (cost.state, cost.cumulative_usd, cost.remaining_usd) == ("done", None, None)
            assert made.fork_cost().aggregate_usd is None
            await made.aclose()

        run(work())


@pytest.mark.contract("E7")
def test_tests_add_no_cost_to_a_branch(real: Mounted) -> None:
    """They do not count as requests, and their output is not read as usage."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            tester = BranchTester("echo '{\"usd\": 9}' >&3; echo '1 passed in 1s'")
            made = coordinator(workspace, {"a": turns(2)}, tester=tester)
            await made.fork([BranchSpec("a", "go", budget_usd=0.7)], parent_history=PARENT)
            await all_ended(made)
            before = made.fork_cost()
            [outcome] = await made.outcomes()
            counts = tester.runs[outcome.branch_id].counts
            assert counts is not None
            assert counts.passed == 1
            assert made.fork_cost() == before
            assert outcome.cost_usd == pytest.approx(0.6)
            await made.aclose()

    run(work())


class TestFork:
    @pytest.mark.contract("E2", "E3")
    def test_the_aggregate_budget_stops_every_running_branch(self) -> None:
        """Also a branch that makes no request."""

        async def work() -> None:
            made = coordinator(None, {"a": turns(9), "b": forever}, aggregate_budget_usd=1.0)
            await made.fork(specs("a", "b"))
            await all_ended(made)
            for label in "ab":
                status = branch_of(made, label).status
                assert status.state == "aggregate_budget_exhausted"
                assert "$1.0000" in (status.error or "")
            assert (made.fork_cost().aggregate_usd or 0) <= 1.0
            assert made.fork_cost().aggregate_budget_usd == 1.0
            assert made.fork_cost().aggregate_remaining_usd == pytest.approx(0.1)
            await made.aclose()

        run(work())

    @pytest.mark.contract("E2")
    def test_a_request_that_costs_more_than_expected_stops_the_other_branches(self) -> None:
        async def work() -> None:
            made = await ended(
                *specs("a", "b"),
                scripts={"a": turns(1, usd=5.0), "b": forever},
                aggregate_budget_usd=1.0,
            )
            assert branch_of(made, "b").status.state == "aggregate_budget_exhausted"
            await made.aclose()

        run(work())

    def test_wall_time_of_all(self) -> None:
        async def work() -> None:
            made = await ended(
                *specs("a", "b"),
                scripts={"a": forever, "b": forever},
                aggregate_budget=Budget(seconds=0.05),
            )
            states = {branch.state for branch in made.inspect_branches()}
            assert states == {"aggregate_budget_exhausted"}
            await made.aclose()

        run(work())


class TestLedger:
    def test_usage_reported_afterwards_counts_for_all_enclosing_accounts(self) -> None:
        """Also what is refused: it was spent."""
        outer = Ledger(Budget(usd=1.0))
        outer.open("around", Budget(tokens=100))
        inner = Ledger(outer=(outer, "around"))
        inner.open("a", Budget(requests=2))
        inner.charge("a", Usage(usd=0.4, tokens=100, requests=1))
        inner.charge("a", Usage(usd=0.4, requests=1))
        with pytest.raises(BudgetExhausted, match="branch a has spent 3 of its budget of 2 req"):
            inner.charge("a", Usage(usd=0.2, requests=1))
        with pytest.raises(BudgetExhausted, match="branch around has spent 101 of its budget of"):
            inner.charge("a", Usage(usd=0.0, tokens=1, requests=1))
        assert inner.spent("a") == Usage(usd=pytest.approx(1.0), tokens=101, requests=4)  # type: ignore[arg-type]
        assert outer.spent("around") == inner.spent("a")
        with pytest.raises(UnknownPriceError, match="the price of a request was not reported"):
            inner.charge("a", Usage(usd=None, requests=1))

    @pytest.mark.contract("E4", "L6")
    def test_concurrent_requests_cannot_overrun_the_aggregate_budget(self) -> None:
        """Pending requests count as spent: of ten threads only three may send."""
        ledger = Ledger(Budget(usd=1.0))
        one = Usage(usd=0.3)
        refused: list[BudgetExhausted] = []
        start = threading.Barrier(10, timeout=60)

        def sends(branch_id: str) -> None:
            start.wait()
            try:
                ledger.reserve(branch_id, one)
            except BudgetExhausted as error:
                refused.append(error)

        threads = []
        for number in range(10):
            ledger.open(str(number), Budget())
            threads.append(threading.Thread(target=sends, args=(str(number),)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 7
        assert {error.scope for error in refused} == {"aggregate"}

    def test_a_released_reservation_can_be_spent_by_another(self) -> None:
        ledger = Ledger(Budget(usd=1.0))
        ledger.open("a", Budget())
        ledger.open("b", Budget())
        held = ledger.reserve("a", Usage(usd=0.9))
        with pytest.raises(BudgetExhausted):
            ledger.reserve("b", Usage(usd=0.9))
        held.release()
        held.settle(Usage(usd=0.9, requests=1))  # it has ended: this does nothing
        ledger.reserve("b", Usage(usd=0.9)).settle(Usage(usd=0.9, requests=1))
        assert ledger.spent().usd == 0.9
        assert ledger.spent("a") == Usage()

    @pytest.mark.contract("L5")
    def test_money_can_be_moved_from_one_branch_to_another(self) -> None:
        ledger = Ledger()
        for branch in "ab":
            ledger.open(branch, Budget(usd=1.0, tokens=5))
        ledger.reserve("a").settle(Usage(usd=0.4, requests=1))
        with pytest.raises(ValueError, match=r"\$0.6000 left"):
            ledger.reallocate("a", "b", 0.7)
        ledger.reallocate("a", "b", 0.6)
        assert (ledger.limits("a").usd, ledger.limits("b").usd) == (0.4, 1.6)
        assert ledger.limits("b").tokens == 5
        with pytest.raises(BudgetExhausted):
            ledger.reserve("a")

    def test_the_price_that_was_unknown_once_stays_unknown(self) -> None:
        ledger = Ledger()
        ledger.open("a", Budget(usd=1.0))
        ledger.reserve("a").settle(Usage(usd=None, requests=1))
        with pytest.raises(UnknownPriceError):
            ledger.reserve("a")

    @pytest.mark.parametrize("usd", [-1, float("nan")])
    def test_a_budget_that_cannot_be_reached_is_a_mistake(self, usd: float) -> None:
        with pytest.raises(ValueError, match="0 or more"):
            Budget(usd=usd)


def test_a_failed_request_costs_what_was_reported() -> None:
    async def work() -> None:
        async def fails(runner: ScriptedRunner) -> None:
            for used in (None, Usage(usd=0.2)):
                with pytest.raises(OSError, match="broke"), runner.branch.request() as meter:
                    if used is not None:
                        meter.used(used)
                    raise OSError("the connection broke")
            assert runner.branch.cost_tracker == Usage(usd=0.2, requests=1)
            await runner.say("done")

        made = await ended(*specs("a"), scripts={"a": fails})
        assert branch_of(made, "a").status.error is None
        await made.aclose()

    run(work())


@pytest.mark.contract("L4")
def test_the_cost_of_a_fork_can_be_projected() -> None:
    def price(model: str | None) -> TokenPrice | None:
        return None if model else TokenPrice(input_usd=1.0, output_usd=10.0)

    projection = project_cost(
        [BranchSpec("a", "x" * 400, budget_usd=0.001), BranchSpec("b", "go", model="unknown:one")],
        history_tokens=1000,
        price=price,
        turns=2,
        answer_tokens=100,
        growth_tokens=500,
    )
    # Two requests of 1100 tokens, the second with 500 more; two answers of 100.
    assert projection.per_branch == {"a": pytest.approx((2700 + 200 * 10) / 1e6), "b": None}
    assert projection.total_usd is None
    assert projection.over_budget == ("a",)


@pytest.mark.contract("E8")
def test_the_partial_history_is_recorded_before_each_request() -> None:
    async def work() -> None:
        made = coordinator(None, {"a": forever})
        await made.fork(specs("a"), parent_history=PARENT)
        branch = branch_of(made, "a")
        await until(lambda: branch.partial_history is not None)
        assert branch.partial_history is not None
        assert [message["content"] for message in branch.partial_history][:2] == ["hi", "go a"]
        await made.aclose()

    run(work())
