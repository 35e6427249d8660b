"""Runs of agents in branches: budgets, models, steering, approvals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
)
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RequestUsage
from support.traces import processes_in

from branching import Workspace
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.judge import Panel
from branching.agent.pydantic_ai import (
    AgentRunner,
    JudgeVerdict,
    LiveForkCapability,
    MessagesCodec,
    RunnerOptions,
    model_judge,
)
from branching.agent.types import BranchSpec, Budget, MergeStrategy, Usage

from .loopback import Call, Reply, served
from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent
from .test_live_fork import in_time

Work = Callable[[ForkCoordinator], Any]


def dollar_a_request(model: str, usage: RequestUsage) -> float | None:
    """A table that knows every model but `free:...`."""
    return None if "unpriced" in model else 1.0


def counting(steps: int) -> Callable[[list[ModelMessage]], ModelResponse]:
    """A model that calls a tool so many times before it has done."""

    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) < steps:
            return call("tick")
        return say(f"ticked {steps}")

    return model


def ticking(model: Any, **options: Any) -> Agent[Any, Any]:
    agent = working_agent(model, **options)

    @agent.tool_plain
    def tick() -> str:
        return "tock"

    return agent


def said_in(event: Any) -> str:
    """The piece of text that an event brings."""
    if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
        return event.part.content
    if isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
        return event.delta.content_delta
    return ""


def coordinated(
    agent: Agent[Any, Any],
    *,
    place: Workspace | None = None,
    options: RunnerOptions | None = None,
    **more: Any,
) -> ForkCoordinator:
    chosen = options or RunnerOptions(price=dollar_a_request)
    return ForkCoordinator(
        agent,
        runner=lambda branch: AgentRunner(agent, branch, chosen),
        codec=MessagesCodec(),
        place=place,
        checkpoint_store=InMemoryCheckpointStore(),
        **more,
    )


async def ended(coordinator: ForkCoordinator) -> None:
    await asyncio.wait({each.task for each in coordinator.branches.values() if each.task})


def forked(agent: Agent[Any, Any], specs: Sequence[BranchSpec], work: Work, **options: Any) -> None:
    """Forks, waits for all branches, and looks."""

    async def call() -> None:
        budget = options.pop("aggregate_budget", None)
        coordinator = coordinated(agent, **options)
        await coordinator.fork(specs, aggregate_budget=budget)
        await ended(coordinator)
        result = work(coordinator)
        if asyncio.iscoroutine(result):
            await result
        await coordinator.aclose()

    in_time(call())


def states(coordinator: ForkCoordinator) -> list[str]:
    return [status.state for status in coordinator.inspect_branches()]


@pytest.mark.contract("E1", "P1")
def test_a_budget_stops_a_run_between_requests_and_the_run_can_still_win() -> None:
    """Two dollars are two requests of six; the sibling continues. The history so far is kept."""

    async def look(coordinator: ForkCoordinator) -> None:
        assert states(coordinator) == ["budget_exhausted", "done"]
        stopped, other = coordinator.branches.values()
        assert stopped.cost_tracker.requests == 2
        assert other.cost_tracker.requests == 6
        assert "$2.0000" in str(stopped.status.error), "the error names spent money and budget"
        merged = await coordinator.merge_or_select(f"pick:{stopped.id}")
        history: Any = merged.history_after_merge
        assert returned(history) == ["tock", "tock"]

    agent = ticking(model_of(counting(5)))
    forked(agent, [BranchSpec("poor", "go", budget_usd=2.0), BranchSpec("rich", "go")], look)


@pytest.mark.contract("P2")
def test_a_budget_in_money_is_refused_if_the_price_is_unknown() -> None:
    """It is refused before a request is sent, unless the caller allows unknown prices."""
    sent: list[int] = []

    def model(messages: list[ModelMessage]) -> ModelResponse:
        sent.append(1)
        return say("sent")

    agent = ticking(model_of(model, "unpriced"))

    def look(coordinator: ForkCoordinator) -> None:
        assert states(coordinator) == ["budget_exhausted", "done"]
        assert "unknown_price" in str(coordinator.inspect_branches()[0].error)
        assert len(sent) == 1

    specs = [BranchSpec("capped", "go", budget_usd=5.0), BranchSpec("free", "go")]
    forked(agent, specs, look)
    sent.clear()
    forked(agent, specs, lambda c: states(c) == ["done", "done"], unknown_price="ignore")
    assert len(sent) == 2


def test_the_default_price_table_has_no_scripted_model() -> None:
    agent = ticking(model_of(counting(1)))
    forked(
        agent,
        [BranchSpec("capped", "go", budget_usd=5.0)],
        lambda coordinator: _assert(states(coordinator) == ["budget_exhausted"]),
        options=RunnerOptions(),
    )


def _assert(fact: bool) -> None:
    assert fact


@pytest.mark.contract("E1")
@pytest.mark.parametrize(
    ("budget", "requests"),
    [(Budget(requests=3), 3), (Budget(usd=3.0), 3), (Budget(tokens=1), 0)],
    ids=["requests", "usd", "tokens"],
)
def test_each_kind_of_budget_stops_a_branch(budget: Budget, requests: int) -> None:
    def look(coordinator: ForkCoordinator) -> None:
        assert states(coordinator) == ["budget_exhausted"]
        (branch,) = coordinator.branches.values()
        assert branch.cost_tracker.requests == requests

    forked(ticking(model_of(counting(9))), [BranchSpec("one", "go", budget=budget)], look)


@pytest.mark.contract("E2")
def test_the_aggregate_budget_stops_all_branches_without_overrun() -> None:
    """Pending requests are reserved: seven dollars are never eight requests."""

    def look(coordinator: ForkCoordinator) -> None:
        assert set(states(coordinator)) == {"aggregate_budget_exhausted"}
        assert coordinator.fork_cost().aggregate_usd == 7.0

    specs = [BranchSpec(f"b{number}", "go") for number in range(3)]
    forked(ticking(model_of(counting(9))), specs, look, aggregate_budget=Budget(usd=7.0))


@pytest.mark.contract("E5")
def test_each_branch_counts_its_own_cost() -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        return counting(int(prompts(messages)[-1]))(messages)

    def look(coordinator: ForkCoordinator) -> None:
        costs = coordinator.fork_cost()
        assert [each.cumulative_usd for each in costs.per_branch] == [2.0, 4.0]
        assert costs.aggregate_usd == 6.0

    forked(ticking(model_of(model)), [BranchSpec("a", "1"), BranchSpec("b", "3")], look)


@pytest.mark.contract("P3")
def test_each_branch_runs_on_its_own_model() -> None:
    asked: list[str] = []

    def script(name: str) -> Callable[[list[dict[str, Any]]], Reply]:
        def answer(messages: list[dict[str, Any]]) -> Reply:
            asked.append(name)
            return Reply(text=f"I am {name}")

        return answer

    def look(coordinator: ForkCoordinator) -> None:
        parents, tests, none = coordinator.branches.values()
        assert parents.final_message == "I am the parent's"
        assert tests.final_message == "success (no tool calls)"
        assert none.status.state == "failed"
        assert "nosuch" in str(none.status.error)
        assert asked == ["the parent's"]

    with served(script("the parent's")) as server:
        specs = [
            BranchSpec("parents", "go"),
            BranchSpec("tests", "go", model="test"),
            BranchSpec("none", "go", model="nosuch:model"),
        ]
        agent: Agent[Any, Any] = Agent(server.model())
        forked(agent, specs, look)


@pytest.mark.contract("P4")
def test_extra_instructions_reach_their_branch_only() -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        last = messages[-1]
        assert isinstance(last, ModelRequest)
        return say(last.instructions or "none")

    def look(coordinator: ForkCoordinator) -> None:
        told = [branch.final_message for branch in coordinator.branches.values()]
        assert told == ["Be brief.", "none"]

    specs = [BranchSpec("a", "go", extra_instructions="Be brief."), BranchSpec("b", "go")]
    forked(ticking(model_of(model)), specs, look)


def test_a_running_branch_can_be_steered() -> None:
    """A message to it is in its next request."""
    controlled = asyncio.Event()

    def model(messages: list[ModelMessage]) -> ModelResponse:
        if prompts(messages)[-1] == "turn left":
            return say("turned left")
        return call("wait")

    agent = ticking(model_of(model))

    @agent.tool_plain
    async def wait() -> str:
        await controlled.wait()
        return "waited"

    async def work() -> None:
        coordinator = coordinated(agent)
        await coordinator.fork([BranchSpec("one", "go")])
        (branch,) = coordinator.branches.values()
        while branch.partial_history is None:
            await asyncio.sleep(0.01)
        coordinator.steer(branch.id, "turn left")
        controlled.set()
        await ended(coordinator)
        assert branch.final_message == "turned left"
        await coordinator.aclose()

    in_time(work())


def test_a_paused_branch_sends_no_request_and_gets_messages_sent_meanwhile() -> None:
    """It waits before its next request, which contains the messages. A stop ends a pause."""

    def model(messages: list[ModelMessage]) -> ModelResponse:
        return call("wait") if prompts(messages)[-1] == "go" else say(prompts(messages)[-1])

    agent = ticking(model_of(model))
    coordinator = coordinated(agent)
    waits = asyncio.Event()

    arrived = 0

    @agent.tool_plain
    async def wait() -> str:
        nonlocal arrived
        arrived += 1
        if arrived < 2:  # both have sent a request before they are paused
            await waits.wait()
            return "waited"
        for branch in coordinator.branches.values():
            branch.pause.begin()
        waits.set()
        return "waited"

    async def work() -> None:
        await coordinator.fork([BranchSpec("one", "go"), BranchSpec("two", "go")])
        one, two = coordinator.branches.values()
        await waits.wait()
        for _ in range(100):  # as often as the run would have to get on
            await asyncio.sleep(0)
        assert (one.is_running, one.cost_tracker.requests) == (True, 1)
        await coordinator.terminate_branch(two.id)
        assert two.status.state == "terminated"
        coordinator.steer(one.id, "turn left")
        one.pause.end()
        await ended(coordinator)
        assert (one.final_message, one.cost_tracker.requests) == ("turn left", 2)
        await coordinator.aclose()

    in_time(work())


def test_a_message_sent_before_the_run_begins_is_not_lost() -> None:
    agent = ticking(model_of(lambda messages: say(prompts(messages)[-1])))

    async def work() -> None:
        coordinator = coordinated(agent)
        await coordinator.fork([BranchSpec("one", "go")])
        (branch,) = coordinator.branches.values()
        coordinator.steer(branch.id, "and quickly")
        await ended(coordinator)
        assert branch.final_message == "and quickly"
        await coordinator.aclose()

    in_time(work())


@pytest.mark.contract("D8", "D9")
@pytest.mark.parametrize("answer", ["approve", "deny"])
def test_approvals_suspend_the_branch_and_denials_are_recorded(answer: Any) -> None:
    done: list[str] = []

    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("drop_table", name="users")
        return say(returned(messages)[-1])

    agent = ticking(model_of(model))

    @agent.tool_plain(requires_approval=True)
    def drop_table(name: str) -> str:
        done.append(name)
        return "dropped"

    async def work() -> None:
        coordinator = coordinated(agent)
        await coordinator.fork([BranchSpec("one", "go")])
        while not (pending := coordinator.iter_pending_approvals()):
            await asyncio.sleep(0.01)
        ((branch_id, request),) = pending
        assert request.tool == "drop_table"
        assert '"users"' in request.arguments
        assert states(coordinator) == ["running"]
        coordinator.answer(branch_id, request, answer)
        await ended(coordinator)
        assert not coordinator.iter_pending_approvals()
        merged = await coordinator.merge_or_select(f"pick:{branch_id}")
        assert done == (["users"] if answer == "approve" else [])
        assert len(merged.blocked_commands) == (answer == "deny")
        await coordinator.aclose()

    in_time(work())


@pytest.mark.contract("D6")
def test_a_finished_branch_continues_with_its_whole_history(real_workspace: Workspace) -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("shell", command=prompts(messages)[-1])
        return say(returned(messages)[-1])

    agent = working_agent(model_of(model))

    async def work() -> None:
        coordinator = coordinated(agent, place=real_workspace)
        await coordinator.fork([BranchSpec("one", "echo 1 > a")])
        await ended(coordinator)
        (branch,) = coordinator.branches.values()
        await (await coordinator.run_on_branch(branch.id, "cat a"))
        assert branch.final_message == "1\n[exit 0]"
        assert prompts(branch.history) == ["echo 1 > a", "cat a"]
        merged = await coordinator.merge_or_select(f"pick:{branch.id}")
        assert prompts(merged.history_after_merge) == ["echo 1 > a", "cat a"]
        await coordinator.aclose()

    in_time(work())
    assert (real_workspace.path / "a").read_text() == "1\n"


def test_background_processes_are_dead_before_files_are_merged(
    real_workspace: Workspace,
) -> None:
    """A process that writes for ever would otherwise change the files under the merge."""
    seen: list[int] = []
    command = "setsid sh -c 'while :; do date >> log; sleep 0.05; done' & echo $! > pid"

    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("shell", command=prompts(messages)[-1])
        return say("started")

    async def work() -> None:
        coordinator = coordinated(working_agent(model_of(model)), place=real_workspace)
        await coordinator.fork([BranchSpec("one", command)])
        await ended(coordinator)
        (branch,) = coordinator.branches.values()
        assert branch.status.state == "done"
        seen.append(len(processes_in(real_workspace.root)))
        await coordinator.merge_or_select(f"pick:{branch.id}")
        seen.append(len(processes_in(real_workspace.root)))
        await coordinator.aclose()

    in_time(work())
    assert seen[0] > 0
    assert seen[1] == 0


@pytest.mark.contract("B20", "E6", "G14", "G15")
def test_a_model_judges_and_is_asked_once(real_workspace: Workspace) -> None:
    """Over HTTP. The cost of the judge is reported and belongs to no branch."""

    def script(messages: list[dict[str, Any]]) -> Reply:
        prompt = messages[-1]["content"]
        winner = next(
            line.split()[2].rstrip(",") for line in prompt.splitlines() if "label two" in line
        )
        verdict = {"winner_branch_id": winner, "confidence": 0.5, "reasoning": "shorter"}
        return Reply(calls=(Call(name="final_result", arguments=verdict),))

    agent = ticking(model_of(counting(1)))
    with served(script) as server:
        panel = Panel(model_judge(server.model(), price=dollar_a_request))

        async def look(coordinator: ForkCoordinator) -> None:
            strategy = MergeStrategy(kind="auto_with_fallback")
            first = await coordinator.resolve(strategy)
            assert not first.committed
            assert isinstance(first.verdict, JudgeVerdict)
            assert first.verdict.reasoning == "shorter"
            assert first.judge_usage is not None
            assert first.judge_usage.usd == 1.0
            again = await coordinator.resolve(strategy)
            assert again.verdict == first.verdict
            assert len(server.requests) == 1
            assert coordinator.fork_cost().aggregate_usd == 4.0

        specs = [BranchSpec("one", "go"), BranchSpec("two", "go")]
        forked(agent, specs, look, judge=panel, place=real_workspace)


@pytest.mark.contract("L16")
def test_a_judges_verdict_can_be_streamed() -> None:
    seen: list[JudgeVerdict] = []
    verdict = {"winner_branch_id": "a", "confidence": 0.5, "reasoning": "short and tested"}
    reply = Reply(calls=(Call(name="final_result", arguments=verdict),))
    from .test_judge import question

    with served(lambda messages: reply) as server:
        panel = Panel(model_judge(server.model(), price=dollar_a_request, on_verdict=seen.append))

        async def work() -> Any:
            return await panel(question())

        judged = in_time(work())
    assert server.requests[0]["stream"] is True
    assert seen[-1] == judged.verdict
    assert judged.usage.usd == 1.0


@pytest.mark.contract("D20")
def test_the_host_can_stream_a_branchs_tokens() -> None:
    parts: list[str] = []
    with served(lambda messages: Reply(text="one two three")) as server:
        agent: Agent[Any, Any] = Agent(server.model())
        options = RunnerOptions(
            price=dollar_a_request,
            on_event=lambda branch, event: parts.append(type(event).__name__),
        )
        forked(agent, [BranchSpec("one", "go")], lambda c: None, options=options)
    assert parts.count("PartDeltaEvent") >= 2


@pytest.mark.contract("D20")
def test_tokens_arrive_before_the_answer_is_complete() -> None:
    """Over HTTP: the server sends the rest only after the first token was received."""
    heard = threading.Event()
    text: list[str] = []

    def on_event(_: BranchRuntime, event: Any) -> None:
        text.append(said_in(event))
        if "one" in "".join(text):
            heard.set()

    with served(lambda messages: Reply(text="one two three", hold=heard)) as server:
        agent: Agent[Any, Any] = Agent(server.model())
        options = RunnerOptions(price=dollar_a_request, on_event=on_event)

        def look(coordinator: ForkCoordinator) -> None:
            [branch] = coordinator.branches.values()
            assert branch.status.state == "done"
            assert branch.cost_tracker == Usage(usd=1.0, tokens=15, requests=1)

        forked(agent, [BranchSpec("one", "go")], look, options=options)
    assert "".join(text).split() == ["one", "two", "three"]


@pytest.mark.contract("D7")
def test_a_branch_can_be_terminated_in_the_middle_of_an_answer() -> None:
    """The connection is closed, and the conversation up to the request is kept."""
    heard = threading.Event()

    def on_event(_: BranchRuntime, event: Any) -> None:
        if "one" in said_in(event):
            heard.set()

    with served(lambda messages: Reply(text="one two three", hold=threading.Event())) as server:
        agent: Agent[Any, Any] = Agent(server.model())
        options = RunnerOptions(price=dollar_a_request, on_event=on_event)

        async def work() -> None:
            coordinator = coordinated(agent, options=options)
            await coordinator.fork([BranchSpec("one", "go")])
            [branch] = coordinator.branches.values()
            assert await asyncio.to_thread(heard.wait, 60)
            await coordinator.terminate_branch(branch.id)
            assert branch.status.state == "terminated"
            assert prompts(branch.partial_history or []) == ["go"]
            assert await asyncio.to_thread(server.hung_up.wait, 60)
            await coordinator.aclose()

        in_time(work())


@pytest.mark.contract("G12", "L17")
def test_the_tests_of_each_branch_are_run_and_counted(real_workspace: Workspace) -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("shell", command=prompts(messages)[-1])
        return say("done")

    capability = LiveForkCapability(
        place=real_workspace, test_command="test -s answer && grep -q 42 answer"
    )
    tester = capability._tester()

    async def look(coordinator: ForkCoordinator) -> None:
        told = await coordinator.outcomes()
        assert [outcome.test_pass_ratio for outcome in told] == [1.0, 0.0]

    specs = [BranchSpec("right", "echo 42 > answer"), BranchSpec("wrong", "echo 41 > answer")]
    agent = working_agent(model_of(model))
    forked(agent, specs, look, place=real_workspace, tester=tester)


def test_the_codec_dumps_and_loads_what_models_say() -> None:
    codec = MessagesCodec()
    agent: Agent[Any, Any] = Agent(TestModel())

    @agent.tool_plain
    def tick() -> str:
        return "tock"

    result = in_time(agent.run("go"))
    messages = result.all_messages()
    assert codec.load(codec.dump(messages)) == messages
    copy = codec.copy(messages)
    copy.pop()
    assert len(copy) == len(messages) - 1
    assert {each.name for each in codec.tool_calls(messages)} == {"tick"}
    assert codec.turns(messages) == 2


@pytest.mark.contract("G16")
def test_retries_and_stuck_loops_are_counted() -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("refuse")
        if since_prompt(messages) == 1:
            return call("warn")
        return say("done")

    agent = ticking(model_of(model))

    @agent.tool_plain
    def refuse() -> str:
        raise ModelRetry("not like that")

    @agent.tool_plain
    def warn() -> str:
        return "Stuck loop detected: tick was called again."

    messages = in_time(agent.run("go")).all_messages()
    codec = MessagesCodec()
    assert codec.retries(messages) == 1
    assert codec.stuck_loop_hits(messages) == 1


def test_fifty_concurrent_branches_each_with_files_of_its_own(real_workspace: Workspace) -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        if since_prompt(messages) == 0:
            return call("shell", command="echo $BRANCHING_BRANCH > mine; cat mine")
        return say(returned(messages)[-1])

    async def look(coordinator: ForkCoordinator) -> None:
        assert states(coordinator) == ["done"] * 50
        said = [branch.final_message for branch in coordinator.branches.values()]
        assert len(set(said)) == 50
        last = list(coordinator.branches)[-1]
        await coordinator.merge_or_select(f"pick:{last}")

    specs = [BranchSpec(f"b{number}", "go") for number in range(50)]
    agent = working_agent(model_of(model))
    forked(agent, specs, look, place=real_workspace, max_branches=50)
    assert (real_workspace.path / "mine").exists()
