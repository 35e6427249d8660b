"""Agents of other frameworks fork their own runs: the same tools, words and effects in each."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from agents import SQLiteSession
from langchain_core.tools import tool as langchain_tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import interrupt
from support.frameworks import (
    FRAMEWORKS,
    RECEIVED_TOKENS,
    SENT_TOKENS,
    Answer,
    Framework,
    Said,
    Script,
    call,
)

from branching import Workspace
from branching.agent import langgraph, openai_agents
from branching.agent.approvals import ApprovalRequest
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.cost_estimate import TokenPrice
from branching.agent.errors import ForkStateError
from branching.agent.live_fork import LiveFork
from branching.agent.types import BranchSpec

SECONDS_MAX = 100


@pytest.fixture(params=FRAMEWORKS.values(), ids=list(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    given: Framework = request.param
    return given


def in_time(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS_MAX))


def users(messages: list[Said]) -> list[str]:
    return [each.text for each in messages if each.kind == "user"]


def results(messages: list[Said]) -> list[str]:
    return [each.text for each in messages if each.kind == "result"]


def last_told(messages: list[Said]) -> str:
    """The last prompt, or the notice of a merge after it."""
    return next(
        each.text
        for each in reversed(messages)
        if each.kind == "user" or each.text.startswith("Merged")
    )


def since_user(messages: list[Said]) -> int:
    """How many results came since a user spoke last."""
    kinds = [each.kind for each in messages]
    return kinds[len(kinds) - kinds[::-1].index("user") :].count("result")


def branch_ids(messages: list[Said]) -> dict[str, str]:
    told = next(text for text in reversed(results(messages)) if text.startswith("Forked:"))
    return {label: branch for branch, label in re.findall(r"- (\S+) \((.*)\)", told)}


class Director:
    """The model of a parent and of its branches. A branch does `run: COMMAND` and says what came
    of it; the parent takes its steps, one an answer."""

    def __init__(self, *steps: Answer | Callable[[list[Said]], Answer]) -> None:
        self._steps = iter(steps)
        self.seen: list[list[Said]] = []

    def __call__(self, messages: list[Said]) -> Answer:
        self.seen.append(messages)
        told = last_told(messages)
        if told.startswith("run: "):
            if not since_user(messages):
                return call("run_command", command=told.removeprefix("run: "))
            return results(messages)[-1]
        if told.startswith("say: "):
            return told.removeprefix("say: ")
        step = next(self._steps)
        return step(messages) if callable(step) else step


def fork(**branches: str) -> list[Said]:
    specs = [{"label": label, "steer": steer} for label, steer in branches.items()]
    return call("fork_run", specs=specs)


def pick(label: str) -> Callable[[list[Said]], Answer]:
    return lambda messages: call("merge_or_select", action=f"pick:{branch_ids(messages)[label]}")


def forks_of(framework: Framework, script: Script, place: Any = None, **options: Any) -> LiveFork:
    options.setdefault("checkpoint_store", InMemoryCheckpointStore())
    return framework.forks(script, place=place, **options)


def test_a_conversation_continues_from_the_winner(
    framework: Framework, real_workspace: Workspace
) -> None:
    """Files and messages of the winner are the parent's, in later turns and after another fork."""
    director = Director(
        call("run_command", command="echo before > parent"),
        fork(one="run: cat parent; echo 1 > one", two="run: echo 2 > two"),
        pick("one"),
        call("run_command", command="cat one"),
        "the end",
        call("run_command", command="cat one parent; pwd"),
        lambda messages: results(messages)[-1],
        fork(three="run: cat one; echo 3 > three"),
        pick("three"),
        "all done",
    )

    async def work() -> None:
        async with forks_of(framework, director, real_workspace) as forks:
            first = await framework.turn(forks, "begin")
            said = framework.read(first)
            assert users(said)[:2] == ["begin", "run: cat parent; echo 1 > one"]
            assert "before\n[exit 0]" in results(said)
            assert any("Merged: kept branch one" in each.text for each in said)
            assert not [each for each in said if each.text == "fork_run"], "the winner did not fork"
            assert framework.unmatched(first) == set()
            assert said[-1] == Said("assistant", "the end")
            assert "run: echo 2 > two" not in users(said)
            assert "1\n[exit 0]" in results(said), "after the merge the files are the winner's"

            second = await framework.turn(forks, "again", first)
            last = framework.read(second)
            assert last[: len(said)] == said
            assert last[-1].text == f"1\nbefore\n{real_workspace.seen_at}\n[exit 0]"
            assert forks.coordinator.is_resolved

            third = framework.read(await framework.turn(forks, "once more", second))
            assert "run: cat one; echo 3 > three" in users(third)
            assert third[-1] == Said("assistant", "all done")

    in_time(work())
    assert (real_workspace.path / "one").read_text() == "1\n"
    assert (real_workspace.path / "three").read_text() == "3\n"
    assert not (real_workspace.path / "two").exists()


def test_the_tools_are_those_of_every_adapter(
    framework: Framework, real_workspace: Workspace
) -> None:
    told: dict[str, str] = {}

    def keep(name: str, then: Callable[[list[Said]], Answer]) -> Callable[[list[Said]], Answer]:
        def step(messages: list[Said]) -> Answer:
            told[name] = results(messages)[-1]
            return then(messages)

        return step

    def of_fork(tool: str) -> Callable[[list[Said]], Answer]:
        def step(messages: list[Said]) -> Answer:
            found = re.search(r"fork_id=(\S+)", "\n".join(results(messages)))
            assert found
            return call(tool, fork_id=found[1])

        return step

    director = Director(
        call("inspect_branches"),
        keep("none", lambda _: fork(one="run: echo 1 > one", two="run: echo 2 > two")),
        lambda _: call("run_command", command="sleep 0"),
        lambda messages: call("terminate_branch", branch_id=branch_ids(messages)["two"]),
        lambda _: call("inspect_branches"),
        keep("inspect", of_fork("diff_branches")),
        keep("diff", of_fork("fork_cost")),
        keep("cost", lambda _: call("merge_or_select", action="pick:nothing")),
        keep("wrong", lambda _: call("delete_file", path="x")),
        keep("delete", lambda _: call("merge_or_select", action="abort")),
        keep("abort", lambda _: "over"),
    )
    forks = forks_of(framework, director, real_workspace)

    async def work() -> None:
        async with forks:
            await framework.turn(forks, "begin")

    in_time(work())
    assert told["none"] == "No active branches."
    assert "(one): " in told["inspect"]
    assert "(two): " in told["inspect"]
    assert "paths touched" in told["diff"]
    assert '"aggregate_usd":null' in told["cost"]
    assert told["wrong"] == "merge_or_select failed: there is no branch 'nothing'"
    assert told["delete"].startswith("delete_file failed: this run is not in a branch")
    assert told["abort"].startswith("Aborted 2 branches")
    assert not (real_workspace.path / "one").exists()


def test_commands_of_one_answer_wait_for_a_fork_and_a_merge(
    framework: Framework, real_workspace: Workspace
) -> None:
    """None of them uses a directory that is frozen or removed."""
    write = call("run_command", command="echo more >> parent")
    director = Director(
        [*write, *write, *fork(one="run: echo 1 > one"), *write, *write],
        lambda messages: [*write, *pick("one")(messages), *write],
        "over",
    )

    async def work() -> set[str]:
        async with forks_of(framework, director, real_workspace) as forks:
            return framework.unmatched(await framework.turn(forks, "begin"))

    assert in_time(work()) == set(), "calls and results of the conversation belong together"
    assert (real_workspace.path / "parent").read_text() == 6 * "more\n"
    assert (real_workspace.path / "one").read_text() == "1\n"
    assert all(
        "exit 0" in text for said in director.seen for text in results(said) if "exit" in text
    )


def test_a_conversation_works_beside_a_branch_of_others(
    framework: Framework, real_workspace: Workspace
) -> None:
    other = real_workspace.branch("others", on_success=None, on_error=None).__enter__()
    director = Director(
        call("run_command", command="echo 1 > a"),
        "done",
        call("run_command", command="cat a > b"),
        "over",
    )

    async def work() -> None:
        async with forks_of(framework, director, real_workspace) as forks:
            await framework.turn(forks, "begin")
            await framework.turn(forks, "go on")

    in_time(work())
    assert (real_workspace.base / "b").read_text() == "1\n"
    assert [record.name for record in real_workspace.branches()] == ["others"]
    other.abort()


def test_a_branch_forks_itself(framework: Framework, real_workspace: Workspace) -> None:
    def script(messages: list[Said]) -> Answer:
        told = last_told(messages)
        if told.startswith("run: "):
            command = told.removeprefix("run: ")
            return (
                results(messages)[-1]
                if since_user(messages)
                else call("run_command", command=command)
            )
        label = {"begin": "outer", "nest": "inner"}.get(told)
        if label is None:
            return "over"
        if since_user(messages):
            return pick(label)(messages)
        return fork(outer="nest") if told == "begin" else fork(inner="run: echo deep > deep")

    async def work() -> None:
        async with forks_of(framework, script, real_workspace) as forks:
            await framework.turn(forks, "begin")

    in_time(work())
    assert (real_workspace.path / "deep").read_text() == "deep\n"


def test_budgets_and_costs_are_those_of_the_framework(
    framework: Framework, real_workspace: Workspace
) -> None:
    price = TokenPrice(input_usd=100.0, output_usd=1000.0)
    one_request = (SENT_TOKENS * 100 + RECEIVED_TOKENS * 1000) / 1e6

    async def work() -> None:
        director = Director()
        options = {"price": lambda name: price if name == "scripted" else None}
        async with forks_of(framework, director, real_workspace, **options) as forks:
            await forks.coordinator.fork(
                [
                    BranchSpec("ends", "run: echo 1 > one"),
                    BranchSpec("stops", "run: echo 2 > two", budget_usd=1.5 * one_request),
                ]
            )
            tasks = {branch.task for branch in forks.coordinator.branches.values() if branch.task}
            await asyncio.wait(tasks)
            ends, stops = forks.coordinator.branches.values()
            assert ends.status.state == "done", ends.status
            assert ends.cost_tracker.usd == pytest.approx(2 * one_request)
            assert ends.cost_tracker.tokens == 2 * (SENT_TOKENS + RECEIVED_TOKENS)
            assert stops.status.state == "budget_exhausted", stops.status
            assert stops.cost_tracker.requests == 1
            said = framework.read(stops.partial_history or [])
            assert said[-1] == Said("result", "[exit 0]"), "the conversation as it was sent last"

    in_time(work())


def test_a_message_reaches_a_branch_that_runs(
    framework: Framework, real_workspace: Workspace
) -> None:
    async def work() -> None:
        director = Director()
        async with forks_of(framework, director, real_workspace) as forks:
            handle = await forks.coordinator.fork(
                [BranchSpec("one", "run: while [ ! -e go ]; do sleep 0.01; done")]
            )
            (branch,) = forks.coordinator.branches.values()
            forks.coordinator.steer(handle.branches[0].id, "say: heard")
            assert branch.path is not None
            (branch.path / "go").write_text("")
            assert branch.task is not None
            await branch.task
            assert branch.status.state == "done", branch.status
            said = framework.read(branch.history)
            assert "say: heard" in users(said)
            assert said[-1] == Said("assistant", "heard")

    in_time(work())


def test_a_branch_continues_with_a_second_prompt(
    framework: Framework, real_workspace: Workspace
) -> None:
    async def work() -> None:
        async with forks_of(framework, Director(), real_workspace) as forks:
            handle = await forks.coordinator.fork([BranchSpec("one", "say: first")])
            (branch,) = forks.coordinator.branches.values()
            assert branch.task is not None
            await branch.task
            await (await forks.coordinator.run_on_branch(handle.branches[0].id, "say: second"))
            said = [each.text for each in framework.read(branch.history)]
            assert said == ["say: first", "first", "say: second", "second"]
            codec = forks.coordinator.codec
            assert codec.turns(branch.history) == 2
            assert codec.preview(branch.history) == "second"
            assert framework.read(codec.load(codec.dump(branch.history))) == framework.read(
                branch.history
            )

    in_time(work())


def test_a_run_that_raises_leaves_nothing(framework: Framework, real_workspace: Workspace) -> None:
    def fail(_: list[Said]) -> Answer:
        raise ZeroDivisionError("the model is away")

    director = Director(fork(one="run: sleep 1000"), fail)

    async def work() -> None:
        with pytest.raises(ZeroDivisionError):
            async with forks_of(framework, director, real_workspace) as forks:
                await framework.turn(forks, "begin")
        assert forks.coordinator.is_resolved

    in_time(work())
    assert real_workspace.branches() == []


def test_a_run_of_the_sdk_that_raises_ends_its_fork(real_workspace: Workspace) -> None:
    async def work() -> None:
        framework = FRAMEWORKS["openai-agents"]
        director = Director(fork(one="run: sleep 1000"))
        async with forks_of(framework, director, real_workspace) as forks:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await framework.turn(forks, "begin")
            assert forks.coordinator.is_resolved
            assert real_workspace.branches() == []

    in_time(work())


def test_without_files_only_the_conversation_forks(framework: Framework) -> None:
    director = Director(
        fork(one="say: hello"),
        pick("one"),
        call("run_command", command="true"),
        lambda messages: results(messages)[-1],
    )

    async def work() -> list[Said]:
        async with forks_of(framework, director) as forks:
            return framework.read(await framework.turn(forks, "begin"))

    said = in_time(work())
    assert Said("assistant", "hello") in said
    assert said[-1].text.startswith("run_command failed: this run has no files")


# What only one of them has.


def test_a_session_of_the_sdk_holds_the_winners_conversation(real_workspace: Workspace) -> None:
    framework = FRAMEWORKS["openai-agents"]
    director = Director(fork(one="say: won", two="say: lost"), pick("one"), "over", "and on")

    async def work() -> None:
        session = SQLiteSession("conversation")
        async with forks_of(framework, director, real_workspace) as forks:
            assert isinstance(forks, openai_agents.LiveFork)
            await forks.run("begin", session=session)
            kept = framework.read(await session.get_items())
            assert [each.text for each in kept[:3]] == ["begin", "say: won", "won"]
            assert kept[-1].text == "over"
            await forks.run("more", session=session)
        assert director.seen[-1][: len(kept)] == kept
        session.close()

    in_time(work())


def test_a_run_of_the_sdk_and_its_branches_are_streamed(real_workspace: Workspace) -> None:
    """The result and the session are those of the winner, as without streaming."""
    framework = FRAMEWORKS["openai-agents"]
    director = Director(fork(one="say: I won", two="say: lost"), pick("one"), "it is over")
    heard: list[tuple[str, str]] = []

    def hear(branch: Any, event: Any) -> None:
        heard.extend((branch.spec.label, word) for word in words_of(event))

    async def work() -> None:
        session = SQLiteSession("conversation")
        async with forks_of(framework, director, real_workspace, on_branch_event=hear) as forks:
            assert isinstance(forks, openai_agents.LiveFork)
            streamed = forks.run_streamed("begin", session=session)
            said = [word async for event in streamed.stream_events() for word in words_of(event)]
            assert said == ["it", "is", "over"]
            assert streamed.final_output == "it is over"
            assert heard.count(("one", "won")) == 1
            items = framework.read(streamed.to_input_list())
            assert [each.text for each in items[:3]] == ["begin", "say: I won", "I won"]
            assert framework.read(await session.get_items()) == items
            with pytest.raises(ForkStateError, match="conversation_id"):
                forks.run_streamed("more", conversation_id="conv_1")
        session.close()

    in_time(work())


def test_messages_of_the_branches_of_a_graph_are_streamed(real_workspace: Workspace) -> None:
    director = Director(fork(one="say: I won", two="say: lost"), pick("one"), "over")
    heard: list[tuple[str, str, str]] = []

    def hear(branch: Any, event: Any) -> None:
        message, metadata = event
        heard.append((branch.spec.label, str(message.content), metadata["langgraph_node"]))

    async def work() -> None:
        framework = FRAMEWORKS["langgraph"]
        async with forks_of(framework, director, real_workspace, on_branch_event=hear) as forks:
            await framework.turn(forks, "begin")

    in_time(work())
    assert heard.count(("one", "I won", "model")) == 1
    assert {label for label, _, _ in heard} <= {"one", "two"}


def test_a_stream_of_the_sdk_that_is_not_read_to_its_end_ends_its_fork(
    real_workspace: Workspace,
) -> None:
    framework = FRAMEWORKS["openai-agents"]
    director = Director(fork(one="run: sleep 600"), "on and on")

    async def work() -> None:
        async with forks_of(framework, director, real_workspace) as forks:
            assert isinstance(forks, openai_agents.LiveFork)
            events = forks.run_streamed("begin").stream_events()
            async for event in events:
                if words_of(event):
                    break
            assert not forks.coordinator.is_resolved
            await events.aclose()  # type: ignore[attr-defined]
            assert forks.coordinator.is_resolved
            assert real_workspace.branches() == []

    in_time(work())


def words_of(event: Any) -> list[str]:
    """Returns the piece of text in an event of a stream, if there is one."""
    data: Any = getattr(event, "data", None)
    return [data.delta] if getattr(data, "type", "") == "response.output_text.delta" else []


def test_a_conversation_on_the_server_is_refused() -> None:
    async def work() -> None:
        async with forks_of(FRAMEWORKS["openai-agents"], Director()) as forks:
            assert isinstance(forks, openai_agents.LiveFork)
            with pytest.raises(ForkStateError, match="conversation_id"):
                await forks.run("begin", conversation_id="conv_1")

    in_time(work())


def test_approvals_of_the_sdk_are_asked_of_the_branch(real_workspace: Workspace) -> None:
    from agents import function_tool

    done: list[str] = []

    @function_tool(needs_approval=True)
    def destroy(what: str) -> str:
        """Destroy something."""
        done.append(what)
        return f"{what} is gone"

    def script(messages: list[Said]) -> Answer:
        if len(results(messages)) < 2:
            return call("destroy", what=f"thing {len(results(messages))}")
        return " | ".join(results(messages))

    async def work() -> None:
        forks = forks_of(FRAMEWORKS["openai-agents"], script, real_workspace, tools=[destroy])
        async with forks:
            await forks.coordinator.fork([BranchSpec("one", "go")])
            (branch,) = forks.coordinator.branches.values()
            for number, answer in enumerate(("approve", "deny")):
                asked: list[tuple[str, ApprovalRequest]] = []
                while not asked or f"thing {number}" not in asked[0][1].arguments:
                    await asyncio.sleep(0.005)
                    asked = forks.coordinator.iter_pending_approvals()
                ((branch_id, request),) = asked
                assert request.tool == "destroy"
                forks.coordinator.answer(branch_id, request, answer)  # type: ignore[arg-type]
            assert branch.task is not None
            await branch.task
            assert branch.status.state == "done", branch.status

    in_time(work())
    assert done == ["thing 0"]


def test_interrupts_of_a_graph_are_asked_of_the_branch(real_workspace: Workspace) -> None:
    @langchain_tool
    def destroy(what: str) -> str:
        """Destroy something."""
        return f"{what}: {interrupt('may I?')}"

    def script(messages: list[Said]) -> Answer:
        return results(messages)[-1] if results(messages) else call("destroy", what="thing")

    async def work() -> str:
        forks = forks_of(
            FRAMEWORKS["langgraph"],
            script,
            real_workspace,
            tools=[destroy],
            compiling={"checkpointer": InMemorySaver()},
        )
        async with forks:
            await forks.coordinator.fork([BranchSpec("one", "go")])
            (branch,) = forks.coordinator.branches.values()
            while not (waiting := forks.coordinator.iter_pending_approvals()):
                await asyncio.sleep(0.005)
            ((branch_id, request),) = waiting
            assert request.arguments == "may I?"
            forks.coordinator.answer(branch_id, request, "approve")
            assert branch.task is not None
            await branch.task
            assert branch.status.state == "done", branch.status
            return branch.final_message

    assert in_time(work()) == "thing: approve"


def test_a_checkpointer_keeps_the_winners_messages(real_workspace: Workspace) -> None:
    framework = FRAMEWORKS["langgraph"]
    director = Director(fork(one="say: won", two="say: lost"), pick("one"), "over", "and on")

    async def work() -> None:
        compiling = {"checkpointer": InMemorySaver()}
        async with forks_of(framework, director, real_workspace, compiling=compiling) as forks:
            assert isinstance(forks, langgraph.LiveFork)
            thread = {"configurable": {"thread_id": "a"}}
            await forks.graph.ainvoke({"messages": [("user", "begin")]}, thread)
            state = await forks.graph.ainvoke({"messages": [("user", "more")]}, thread)
        said = [each.text for each in framework.read(state["messages"])]
        assert said[:3] == ["begin", "say: won", "won"]
        assert said[-2:] == ["more", "and on"]

    in_time(work())


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("openai_agents", "agents", "openai-agents"), ("langgraph", "langchain_core", "langgraph")],
)
def test_a_missing_package_is_named_with_its_extra(module: str, package: str, extra: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; import branching.agent.{module}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert f'needs its extra: pip install ".[{extra}]"' in done.stderr
