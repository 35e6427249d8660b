"""An agent forks its own run, on real branches and with real commands."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic_ai import Agent, RunContext
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, ToolReturnPart

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.fork_tools import NO_BRANCHES, NOT_ENABLED, ForkTools
from branching.agent.project_tests import TIMEOUT_SECONDS
from branching.agent.pydantic_ai import (
    LiveForkCapability,
    RunnerOptions,
    agent_coordinator,
    coordinator_of,
    forking,
)
from branching.agent.types import BranchSpec, MergeStrategy

from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent

SECONDS_MAX = 100
Answer = Callable[[list[ModelMessage]], ModelResponse]


@dataclass
class Deps:
    """The dependencies of an application's runs."""

    fork_coordinator: Any = None
    todos: list[str] = field(default_factory=list)
    message_queue: list[str] = field(default_factory=list)
    team_bus: list[str] = field(default_factory=list)


def in_time(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, SECONDS_MAX))


def capability(place: Any = None, **options: Any) -> LiveForkCapability:
    options.setdefault("checkpoint_store", InMemoryCheckpointStore())
    return LiveForkCapability(place=place, **options)


def spec(label: str, steer: str, **more: Any) -> dict[str, Any]:
    return {"label": label, "steer": steer, **more}


def ids(messages: list[ModelMessage]) -> dict[str, str]:
    """The branches of the last fork, by label."""
    told = returned(messages, "fork_run")[-1]
    return {label: branch for branch, label in re.findall(r"- (\S+) \((.*)\)", told)}


def fork_id(messages: list[ModelMessage]) -> str:
    found = re.search(r"fork_id=(\S+)", returned(messages, "fork_run")[-1])
    assert found
    return found[1]


class Director:
    """The model of a parent and of its branches: `parent` is a list of steps, one an answer; a
    branch does `run: COMMAND` in its shell and says what came of it."""

    def __init__(self, *parent: Answer | ModelResponse) -> None:
        self.parent = parent
        self.turn = 0
        self.seen: list[list[ModelMessage]] = []

    def __call__(self, messages: list[ModelMessage]) -> ModelResponse:
        self.seen.append(list(messages))
        told = prompts(messages)[-1]
        if told.startswith("run: "):
            if since_prompt(messages) == 0:
                return call("shell", command=told.removeprefix("run: "))
            return say(returned(messages, "shell")[-1])
        if told.startswith("delete: "):
            if since_prompt(messages) == 0:
                return call("delete_file", path=told.removeprefix("delete: "))
            return say(returned(messages, "delete_file")[-1])
        if told.startswith("say: "):
            return say(told.removeprefix("say: "))
        step = self.parent[self.turn]
        self.turn += 1
        return step if isinstance(step, ModelResponse) else step(messages)


def agent_of(director: Any, *capabilities: Any, **options: Any) -> Agent[Any, Any]:
    agent = working_agent(model_of(director), capabilities=list(capabilities), **options)

    @agent.tool
    async def until_done(ctx: RunContext[Any]) -> str:
        """Wait for all branches."""
        (fork,) = [part for part in _capabilities(ctx) if isinstance(part, LiveForkCapability)]
        assert fork.coordinator is not None
        tasks = {branch.task for branch in fork.coordinator.branches.values() if branch.task}
        await asyncio.wait(tasks)
        return "all done"

    return agent


def _capabilities(ctx: RunContext[Any]) -> list[Any]:
    found: list[Any] = []
    assert ctx.root_capability is not None
    ctx.root_capability.apply(found.append)
    return found


def fork(*specs: dict[str, Any], **options: Any) -> ModelResponse:
    return call("fork_run", specs=list(specs), **options)


def pick(label: str) -> Answer:
    return lambda messages: call("merge_or_select", action=f"pick:{ids(messages)[label]}")


# A. Switching on


@pytest.mark.contract("A1")
def test_forking_is_off_on_or_a_capability() -> None:
    assert forking() == forking(False) == []
    (default,) = forking(True)
    assert isinstance(default, LiveForkCapability)
    own = LiveForkCapability(max_branches=3)
    assert forking(own) == [own]
    for wrong in (1, "yes", None):
        with pytest.raises(TypeError, match="forking must be"):
            forking(wrong)  # type: ignore[arg-type]


@pytest.mark.contract("A2")
def test_the_capability_has_the_documented_defaults() -> None:
    it = LiveForkCapability()
    assert (it.max_branches, it.max_depth, it.store, it.keep_artifacts) == (10, 2, None, False)
    assert (it.test_command, it.test_timeout_s) == (None, 60.0)
    assert TIMEOUT_SECONDS == 60.0


@pytest.mark.contract("A3", "A6")
def test_latest_messages_is_the_parents_last_request_and_the_result_is_unchanged() -> None:
    it = capability()
    seen: list[LiveForkCapability] = []

    def parent(messages: list[ModelMessage]) -> ModelResponse:
        return say("fine")

    agent = agent_of(Director(parent), it)

    async def work() -> Any:
        async with agent.iter("hello") as run:
            async for _ in run:
                pass
            seen.extend(
                part for part in _capabilities_of(run) if isinstance(part, LiveForkCapability)
            )
            return run.result

    result = in_time(work())
    assert result.output == "fine"
    assert seen[0] is not it
    assert prompts(seen[0].latest_messages) == ["hello"]
    assert len(seen[0].latest_messages) == 1, "the request, not the answer"
    assert it.latest_messages == []


def _capabilities_of(run: Any) -> list[Any]:
    found: list[Any] = []
    run.ctx.deps.root_capability.apply(found.append)
    return found


@pytest.mark.contract("A4", "A9", "A10")
def test_the_next_run_finds_an_open_fork(real_workspace: Workspace) -> None:
    director = Director(
        fork(spec("one", "run: echo 1 > one")),
        say("later"),
        call("until_done"),
        pick("one"),
        lambda messages: say(prompts(messages)[-1]),
    )
    agent = agent_of(director, capability(real_workspace), deps_type=Deps)
    deps = Deps()

    async def work() -> None:
        first = await agent.run("begin", deps=deps)
        kept = coordinator_of(deps)
        assert kept is not None
        assert not kept.is_resolved
        template = vars(kept)["capability"]
        second = await agent.run("go on", message_history=first.all_messages(), deps=deps)
        assert coordinator_of(deps) is kept
        assert vars(kept)["capability"] is not template
        assert kept.is_resolved
        assert "Merged: kept branch one" in second.output
        await kept.aclose()

    in_time(work())
    assert (real_workspace.path / "one").read_text() == "1\n"


@pytest.mark.contract("A9")
def test_the_conversation_identifies_the_fork_if_the_dependencies_have_no_field_for_it(
    real_workspace: Workspace,
) -> None:
    director = Director(
        fork(spec("one", "run: echo 1 > one")),
        say("later"),
        call("until_done"),
        pick("one"),
        lambda messages: say(prompts(messages)[-1]),
    )
    agent = agent_of(director, capability(real_workspace))

    async def work() -> str:
        first = await agent.run("begin")
        second = await agent.run("go on", message_history=first.all_messages())
        return str(second.output)

    assert "Merged: kept branch one" in in_time(work())
    assert (real_workspace.path / "one").exists()


@pytest.mark.contract("A5")
def test_concurrent_runs_share_no_fork() -> None:
    meet = asyncio.Barrier(2) if hasattr(asyncio, "Barrier") else None
    director = model_of(
        lambda messages: (
            fork(spec("x", "say: x"))
            if not returned(messages) and prompts(messages)[-1].startswith("go")
            else say(prompts(messages)[-1].removeprefix("say: "))
        )
    )
    agent: Agent[Any, Any] = Agent(director, deps_type=Deps, capabilities=[capability()])
    first, second = Deps(), Deps()

    async def work() -> None:
        await asyncio.gather(agent.run("go 1", deps=first), agent.run("go 2", deps=second))
        one, two = coordinator_of(first), coordinator_of(second)
        assert one is not None
        assert two is not None
        assert one is not two
        assert one.fork_id != two.fork_id
        assert len(one.branches) == len(two.branches) == 1
        await one.aclose()
        await two.aclose()

    del meet
    in_time(work())


@pytest.mark.contract("A7", "E8")
def test_a_branch_records_its_conversation_at_each_request(real_workspace: Workspace) -> None:
    """The pending tool call is not in it."""
    director = Director(fork(spec("one", "run: echo hi")), call("until_done"), say("end"))
    deps = Deps()
    agent = agent_of(director, capability(real_workspace), deps_type=Deps)

    async def work() -> None:
        await agent.run("begin", deps=deps)
        kept = coordinator_of(deps)
        assert kept is not None
        (branch,) = kept.branches.values()
        assert branch.partial_history is not None
        last = branch.partial_history[-1]
        assert isinstance(last, ModelRequest)
        assert isinstance(last.parts[0], ToolReturnPart)
        assert prompts(branch.partial_history) == ["begin", "run: echo hi"]
        await kept.aclose()

    in_time(work())


@pytest.mark.contract("A8")
def test_the_instructions_explain_forking() -> None:
    told: list[str] = []

    def parent(messages: list[ModelMessage]) -> ModelResponse:
        (message,) = messages
        assert isinstance(message, ModelRequest)
        told.append(message.instructions or "")
        return say("ok")

    in_time(agent_of(Director(parent), capability()).run("hello"))
    assert "## Forking" in told[0]
    assert "inspect_branches" in told[0]
    assert "before your turn ends" in told[0]


@pytest.mark.parametrize("tells_edits", [True, False])
def test_the_model_of_a_branch_gets_the_edits_that_a_person_made_while_it_answered(
    real_workspace: Workspace, tells_edits: bool
) -> None:
    told: list[list[str]] = []

    def answer(messages: list[ModelMessage]) -> ModelResponse:
        [branch] = [each for each in real_workspace.branches() if each.name.endswith("-one")]
        if not returned(messages, "shell"):
            (branch.path / "person").write_text("edited")
            return call("shell", command="echo own > own")
        told.append(prompts(messages))
        return say("done")

    async def work() -> None:
        async with agent_coordinator(
            working_agent(model_of(answer)),
            real_workspace,
            runs=RunnerOptions(tells_edits=tells_edits),
            checkpoint_store=InMemoryCheckpointStore(),
        ) as coordinator:
            await coordinator.fork([BranchSpec("one", "run: go")])
            [status] = await coordinator.wait()
            assert status.state == "done", status

    in_time(work())
    [seen] = told
    edits = "These files were changed outside of this run since your last step:\n- person"
    assert seen == (["run: go", edits] if tells_edits else ["run: go"])


@pytest.mark.parametrize("tells_edits", [True, False])
def test_the_capability_decides_whether_a_branch_gets_notes_of_edits(
    real_workspace: Workspace, tells_edits: bool
) -> None:
    told: list[list[str]] = []

    def answer(messages: list[ModelMessage]) -> ModelResponse:
        if "run: go" not in prompts(messages):
            if not returned(messages, "fork_run"):
                return call("fork_run", specs=[spec("one", "run: go")])
            return call("merge_or_select", action=f"pick:{ids(messages)['one']}")
        if not returned(messages, "shell"):
            [branch] = [each for each in real_workspace.branches() if each.name.endswith("-one")]
            (branch.path / "person").write_text("edited")
            return call("shell", command="echo own > own")
        told.append(prompts(messages))
        return say("done")

    forking = capability(real_workspace, tells_edits=tells_edits)
    in_time(agent_of(answer, forking).run("hello"))
    edits = "These files were changed outside of this run since your last step:\n- person"
    in_the_branch = told[0]
    assert (edits in in_the_branch) == tells_edits


# C. The tools


@pytest.mark.contract("C1", "C3", "C4", "C5", "C10", "C11", "P8")
def test_an_agent_forks_inspects_and_picks(real_workspace: Workspace) -> None:
    """End to end: the winner's files, modes, links and git repository are merged; its turns become
    the parent's."""
    git = "git -c user.name=a -c user.email=a@b"
    work = (
        "run: printf '#!/bin/sh\\n' > tool.sh && chmod 755 tool.sh && ln -s tool.sh link && "
        f"mkdir build && echo x > build/x && git init -q . && git add -A && {git} commit -qm one"
    )
    told: dict[str, Any] = {}

    def inspect(messages: list[ModelMessage]) -> ModelResponse:
        told["ids"] = ids(messages)
        return call("inspect_branches")

    def diff(messages: list[ModelMessage]) -> ModelResponse:
        told["inspected"] = returned(messages, "inspect_branches")[-1]
        return call("diff_branches", fork_id=fork_id(messages))

    def cost(messages: list[ModelMessage]) -> ModelResponse:
        told["diff"] = returned(messages, "diff_branches")[-1]
        return call("fork_cost", fork_id=fork_id(messages))

    def end(messages: list[ModelMessage]) -> ModelResponse:
        told["last"] = list(messages)
        return say("merged")

    director = Director(
        fork(spec("git", work), spec("plain", "run: echo plain > other")),
        call("until_done"),
        inspect,
        diff,
        cost,
        pick("git"),
        end,
    )
    agent = agent_of(director, capability(real_workspace, unknown_price="ignore"))
    result = in_time(agent.run("make something"))
    root = real_workspace.path
    assert result.output == "merged"
    assert (root / "tool.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "link").is_symlink()
    assert (root / "build" / "x").read_text() == "x\n"
    assert (root / ".git" / "HEAD").is_file()
    assert not (root / "other").exists()
    assert told["inspected"].count("done") == 2
    assert '"tool.sh"' in told["diff"]
    assert '"other"' in told["diff"]
    # The branch began with the conversation up to the call, and the parent goes on
    # with the branch's.
    branch = next(seen for seen in director.seen if prompts(seen)[-1] == work)
    assert prompts(branch) == ["make something", work]
    assert not returned(branch, "fork_run")
    assert prompts(told["last"])[:2] == ["make something", work]
    assert "Merged: kept branch git" in prompts(told["last"])[-1]
    assert prompts(result.all_messages())[:2] == ["make something", work]
    assert "[exit 0]" in returned(result.all_messages(), "shell")[-1]


def test_the_usage_of_the_winner_counts_for_the_parent() -> None:
    def model(messages: list[ModelMessage]) -> ModelResponse:
        return say("word " * 1000) if prompts(messages)[-1] == "talk" else director(messages)

    director = Director(fork(spec("wordy", "talk")), call("until_done"), pick("wordy"), say("end"))
    used = in_time(agent_of(model, capability()).run("go")).usage
    # A scripted model counts all that stands in the conversation, too: once more at the end.
    assert used.output_tokens > 1500
    assert used.requests == 4, "the parent's own"


@pytest.mark.contract("D21")
def test_the_parent_uses_one_workspace_path_before_during_and_after_a_fork(
    real_workspace: Workspace,
) -> None:
    """One path, whichever branch it shows; the parent's changes during the fork are kept."""
    director = Director(
        call("shell", command="echo before > before; pwd"),
        fork(spec("one", "run: cat before; test ! -e during; echo one > one; pwd")),
        call("shell", command="echo during > during; pwd"),
        call("until_done"),
        pick("one"),
        call("shell", command="cat before during one; pwd"),
        lambda messages: say(returned(messages, "shell")[-1]),
    )
    agent = agent_of(director, capability(real_workspace))
    result = in_time(agent.run("go"))
    where = str(real_workspace.seen_at)
    assert result.output == f"before\nduring\none\n{where}\n[exit 0]"
    branch_said = returned(result.all_messages(), "shell")
    assert f"before\n{where}\n[exit 0]" in branch_said
    assert (real_workspace.path / "during").read_text() == "during\n"


@pytest.mark.contract("C2")
@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "at least one branch"),
        ([spec(str(number), "say: x") for number in range(4)], "the maximum is 3"),
        ([spec("same", "say: x"), spec("same", "say: y")], "same"),
        ([spec("", "say: x")], "label"),
    ],
    ids=["none", "too many", "twice", "no label"],
)
def test_invalid_specs_are_answered_with_an_error_text(specs: list[Any], message: str) -> None:
    director = Director(fork(*specs), lambda messages: say(returned(messages)[-1]))
    result = in_time(agent_of(director, capability(max_branches=3)).run("go"))
    assert result.output.startswith("fork_run failed: ")
    assert message in result.output


@pytest.mark.contract("L13")
def test_an_agent_merges_the_hunks_and_paths_that_it_selects(real_workspace: Workspace) -> None:
    """Hunks have the numbers of the diff shown to the agent; an unknown number merges nothing."""
    lines = [f"line {number}\n" for number in range(40)]
    (real_workspace.base / "text").write_text("".join(lines))
    told: dict[str, str] = {}
    branch: list[str] = []

    def merge(hunk: int) -> Answer:
        def answer(messages: list[ModelMessage]) -> ModelResponse:
            told[str(hunk)] = returned(messages)[-1]
            branch[:] = branch or [ids(messages)["one"]]
            choice = {"paths": ["text", "kept"], "hunks": {"text": [hunk]}}
            return call("merge_or_select", action=f"pick:{branch[0]}", **choice)

        return answer

    director = Director(
        fork(spec("one", "run: sed -i 's/line 1$/first/; s/line 38$/last/' text; touch kept left")),
        call("until_done"),
        lambda messages: call("diff_branches", fork_id=fork_id(messages)),
        merge(7),
        merge(1),
        lambda messages: say(returned(messages)[-1]),
    )
    in_time(agent_of(director, capability(real_workspace)).run("go"))
    assert told["7"].count("@@") == 4
    assert told["1"].startswith("merge_or_select failed: there are 2 hunks")
    root = real_workspace.path
    assert (root / "text").read_text() == "".join([*lines[:38], "last\n", lines[39]])
    assert (root / "kept").exists()
    assert not (root / "left").exists()


@pytest.mark.contract("C5", "C7")
def test_abort_works_and_invalid_actions_are_answered_with_an_error_text(
    real_workspace: Workspace,
) -> None:
    said: list[str] = []

    def then(step: ModelResponse) -> Answer:
        def answer(messages: list[ModelMessage]) -> ModelResponse:
            said.append(returned(messages)[-1])
            return step

        return answer

    director = Director(
        call("merge_or_select", action="pick:nobody"),
        then(fork(spec("one", "run: echo 1 > one"))),
        then(call("merge_or_select", action="win")),
        then(call("merge_or_select", action="pick:nobody")),
        then(call("terminate_branch", branch_id="nobody")),
        then(call("diff_branches", fork_id="other")),
        then(call("fork_cost", fork_id="other")),
        then(call("merge_or_select", action="abort")),
        then(call("inspect_branches")),
        then(call("diff_branches", fork_id="other")),
        then(say("end")),
    )
    in_time(agent_of(director, capability(real_workspace)).run("go"))
    assert said[0] == "merge_or_select failed: no fork is open; fork_run opens one"
    assert "'win' is not an action" in said[2]
    assert "'nobody'" in said[3]
    assert said[4].startswith("terminate_branch failed: ")
    assert "not other" in said[5]
    assert "not other" in said[6]
    assert said[7].startswith("Aborted 1 branches")
    assert said[8] == NO_BRANCHES
    assert said[9] == "There is no open fork."
    assert not (real_workspace.path / "one").exists()


@pytest.mark.contract("C6")
def test_auto_aborts_if_every_branch_failed() -> None:
    def broken(messages: list[ModelMessage]) -> ModelResponse:
        if prompts(messages)[-1] == "break":
            raise RuntimeError("broken")
        return director(messages)

    director = Director(
        fork(spec("one", "break"), spec("two", "break")),
        call("merge_or_select", action="auto"),
        lambda messages: say(returned(messages)[-1]),
    )
    result = in_time(agent_of(broken, capability()).run("go"))
    assert result.output.startswith("Every branch failed: aborted")


@pytest.mark.contract("G1", "G2", "G3", "G4", "P12")
@pytest.mark.parametrize(
    ("kind", "threshold", "expected"),
    [
        ("auto", 0.99, "Merged: kept branch two"),
        ("vote", 0.99, "Merged: kept branch two"),
        ("auto_with_fallback", 0.1, "Merged: kept branch two"),
        ("auto_with_fallback", 0.99, "below the threshold"),
        ("manual", 0.1, "the strategy of this fork is manual"),
    ],
)
def test_the_auto_tool_follows_the_merge_strategy(
    kind: Any, threshold: float, expected: str
) -> None:
    """Below the threshold nothing is merged."""

    def judge(case: Any) -> str:
        return next(str(each.branch_id) for each in case.outcomes if each.label == "two")

    strategy = {"kind": kind, "confidence_threshold": threshold, "judge_model": "x:y"}
    director = Director(
        fork(spec("one", "say: 1"), spec("two", "say: 2"), strategy=strategy),
        call("merge_or_select", action="auto"),
        lambda messages: say([*returned(messages), *prompts(messages)][-1]
                             if "Merged" in prompts(messages)[-1] else returned(messages)[-1]),
    )  # fmt: skip
    deps = Deps()
    agent = agent_of(director, capability(judge=judge), deps_type=Deps)

    async def work() -> str:
        result = await agent.run("go", deps=deps)
        kept = coordinator_of(deps)
        assert kept is not None
        assert kept.is_resolved is expected.startswith("Merged")
        await kept.aclose()
        return str(result.output)

    assert expected in in_time(work())


@pytest.mark.contract("C8")
def test_a_terminated_branch_has_the_state_terminated() -> None:
    def endless(messages: list[ModelMessage]) -> ModelResponse:
        if prompts(messages)[-1] == "for ever":
            return call("nap")
        return director(messages)

    director = Director(
        fork(spec("one", "for ever")),
        lambda messages: call("terminate_branch", branch_id=ids(messages)["one"]),
        lambda messages: say(returned(messages)[-1]),
    )
    deps = Deps()
    agent = agent_of(endless, capability(), deps_type=Deps)

    @agent.tool_plain
    async def nap() -> str:
        await asyncio.sleep(0.01)
        return "rested"

    async def work() -> str:
        result = await agent.run("go", deps=deps)
        kept = coordinator_of(deps)
        assert kept is not None
        await kept.aclose()
        return str(result.output)

    assert in_time(work()).endswith("(one): terminated")


@pytest.mark.contract("C9")
def test_delete_file_deletes_in_the_branch_only(real_workspace: Workspace) -> None:
    (real_workspace.path / "old").write_text("old\n")
    in_branch: list[str] = []

    def branch(messages: list[ModelMessage]) -> ModelResponse:
        if prompts(messages)[-1] != "delete":
            return director(messages)
        if since_prompt(messages) < 2:
            return call("delete_file", path=["old", "absent"][since_prompt(messages)])
        in_branch.extend(returned(messages, "delete_file"))
        return say("deleted")

    director = Director(
        call("delete_file", path="old"),
        fork(spec("one", "delete")),
        call("until_done"),
        pick("one"),
        say("end"),
    )
    agent = agent_of(branch, capability(real_workspace))
    seen = director.seen
    in_time(agent.run("go"))
    assert any("not in a branch" in text for text in returned(seen[1], "delete_file"))
    assert in_branch[-2] == "Deleted old."
    assert in_branch[-1].startswith("delete_file failed: ")
    assert not (real_workspace.path / "old").exists()


@pytest.mark.contract("C12")
def test_every_tool_answers_not_enabled_without_a_coordinator() -> None:
    tools = ForkTools(LiveForkCapability())

    async def work() -> list[Any]:
        return [
            await tools.fork_run([]),
            await tools.inspect_branches(),
            await tools.merge_or_select("abort"),
            await tools.terminate_branch("x"),
            await tools.delete_file("x"),
            await tools.diff_branches("x"),
            await tools.fork_cost("x"),
        ]

    assert in_time(work()) == [NOT_ENABLED] * 7


@pytest.mark.contract("F11", "F12")
def test_a_nested_fork_merges_into_its_branch(real_workspace: Workspace) -> None:
    """Two levels are allowed; a third is refused."""
    depth: list[str] = []

    def model(messages: list[ModelMessage]) -> ModelResponse:
        told = prompts(messages)
        if told[-1].startswith(("run: ", "go")) or told[-1].startswith("Merged: kept branch outer"):
            return director(messages)
        if told[-1] == "deeper":
            if not returned(messages, "fork_run"):
                return fork(spec("inner", "deepest"))
            if "all done" not in returned(messages):
                return call("until_done")
            return pick("inner")(messages)
        if told[-1] == "deepest":
            tools = returned(messages)
            if since_prompt(messages) == 0:
                return fork(spec("too deep", "say: x"))
            if since_prompt(messages) == 1:
                depth.append(tools[-1])
                return call("shell", command="echo inner > inner")
            return say("inner done")
        return say("outer done")

    director = Director(
        fork(spec("outer", "deeper")),
        call("until_done"),
        pick("outer"),
        say("end"),
    )
    agent = agent_of(model, capability(real_workspace))
    assert in_time(agent.run("go")).output == "end"
    assert depth[0].startswith("fork_run failed: ")
    assert "2 forks deep" in depth[0]
    assert (real_workspace.path / "inner").read_text() == "inner\n"


def test_without_a_place_the_conversations_fork_and_the_files_do_not() -> None:
    director = Director(
        fork(spec("one", "say: 1"), spec("two", "say: 2")),
        call("until_done"),
        pick("two"),
        lambda messages: say(f"{len(prompts(messages))} prompts"),
    )
    result = in_time(agent_of(director, capability()).run("go"))
    assert result.output == "3 prompts"
    assert prompts(result.all_messages())[1] == "say: 2"


@pytest.mark.contract("B4", "B6", "P5", "P6")
def test_dependencies_are_forked_by_the_isolation_settings() -> None:
    deps = Deps(todos=["buy milk"], message_queue=["hello"], team_bus=["all"])
    kept: dict[str, Deps] = {}

    def model(messages: list[ModelMessage]) -> ModelResponse:
        told = prompts(messages)[-1]
        if told.startswith("look "):
            if since_prompt(messages) == 0:
                return call("look", name=told)
            return say("looked")
        return director(messages)

    director = Director(
        fork(spec("own", "look own")),
        call("until_done"),
        call("merge_or_select", action="abort"),
        fork(
            spec("shared", "look shared"),
            isolation={"todos": "share", "message_queue": "shared", "team_bus": "isolated"},
        ),
        call("until_done"),
        call("merge_or_select", action="abort"),
        say("end"),
    )
    agent = agent_of(model, capability(), deps_type=Deps)

    @agent.tool
    def look(ctx: RunContext[Deps], name: str) -> str:
        kept[name.removeprefix("look ")] = ctx.deps
        return "seen"

    in_time(agent.run("go", deps=deps))
    own, shared = kept["own"], kept["shared"]
    assert (own.todos, own.message_queue) == ([], [])
    assert own.team_bus is deps.team_bus
    assert shared.todos is deps.todos
    assert shared.message_queue is deps.message_queue
    assert shared.team_bus == []
    assert own.fork_coordinator is not deps.fork_coordinator


def test_a_merge_into_a_closed_fork_is_an_error_outside_of_tools() -> None:
    """The Python side raises what the tools answer."""
    coordinator = ForkCoordinator(runner=lambda branch: branch.runner)  # type: ignore[arg-type,return-value]

    async def work() -> None:
        with pytest.raises(ForkStateError):
            await coordinator.resolve(MergeStrategy(kind="auto"))

    in_time(work())
