"""An agent's run as a candidate of the patterns, on real branches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai.messages import ModelMessage, ModelResponse

from branching import (
    BeamSearch,
    BestOfN,
    BranchError,
    Cascaded,
    Reflexion,
    Speculate,
    Tournament,
    TreeOfThoughts,
    Workspace,
)
from branching.agent.pause import Pause
from branching.agent.pydantic_ai import agent_candidate
from branching.patterns import Event
from branching.runlog.run_controller import RunController

from .loopback import Call, Reply, served
from .scripted import call, model_of, prompts, returned, say, since_prompt, working_agent


def worker(messages: list[ModelMessage]) -> ModelResponse:
    """Runs one command, and reports it."""
    told = prompts(messages)[-1]
    if since_prompt(messages) == 0:
        return call("shell", command=told)
    return say(returned(messages)[-1])


AGENT = working_agent(model_of(worker))


def succeeded(result: Any) -> bool:
    return "[exit 0]" in result.output


def of(prompt: Any) -> Any:
    return agent_candidate(AGENT, prompt, success=succeeded)


def size(path: Path) -> float:
    return float((path / "made").stat().st_size)


def test_speculate_commits_the_files_of_the_first_agent_that_succeeds(
    real_workspace: Workspace,
) -> None:
    outcome = Speculate([of("false"), of("echo two > made"), of("exit 4")])(real_workspace)
    assert outcome.winner is not None
    assert outcome.winner.branch_index == 1
    assert (real_workspace.path / "made").read_text() == "two\n"


@pytest.mark.parametrize("name", ["best_of_n", "tournament", "tree_of_thoughts", "beam_search"])
def test_ranking_patterns_take_agents(real_workspace: Workspace, name: str) -> None:
    candidates = [of("printf 1 > made"), of("printf 333 > made"), of("printf 22 > made")]
    patterns = {
        "best_of_n": BestOfN(candidates, evaluate=size),
        "tournament": Tournament(candidates, judge=lambda a, b: int(size(a) < size(b))),
        "tree_of_thoughts": TreeOfThoughts(candidates, evaluate=size),
        "beam_search": BeamSearch(
            candidates, expand=lambda path, depth: [of("printf + >> made")], evaluate=size
        ),
    }
    outcome = patterns[name](real_workspace)
    assert outcome.committed
    wanted = "333+" if name == "beam_search" else "333"
    assert (real_workspace.path / "made").read_text() == wanted


def test_retrying_patterns_hand_their_feedback_to_the_prompt(real_workspace: Workspace) -> None:
    def again(path: Path, attempt: int, feedback: str | None) -> str:
        return "true" if feedback else "echo broken > why; false"

    outcome = Reflexion(of(again), critique=lambda path: (path / "why").read_text())(real_workspace)
    assert [result.success for result in outcome.all_results] == [False, True]

    def wave(path: Path, feedback: list[str]) -> str:
        return "echo learnt > made" if feedback else "echo no; false"

    assert Cascaded(of(wave), fan_out=(1, 2))(real_workspace).committed
    assert (real_workspace.path / "made").read_text() == "learnt\n"


def test_a_score_may_come_from_the_run(real_workspace: Workspace) -> None:
    def score(result: Any) -> float:
        return float(result.output.split("[")[0])

    candidates = [agent_candidate(AGENT, f"echo {n}", score=score) for n in (1, 9, 4)]
    outcome = BestOfN(candidates)(real_workspace)
    assert outcome.winner is not None
    assert (outcome.winner.branch_index, outcome.winner.score) == (1, 9.0)


def test_an_agent_that_is_not_needed_ends_with_what_it_runs(real_workspace: Workspace) -> None:
    """The loser waits for a file that is never created: it ends only when it is cancelled."""
    waits = "while [ ! -e never ]; do sleep 0.1; done"
    outcome = Speculate([of(waits), of("true")])(real_workspace)
    assert outcome.winner is not None
    assert outcome.winner.branch_index == 1
    assert outcome.all_results[0].state == "cancelled"


def when_it_runs(deed: Callable[[], None]) -> None:
    """Calls the function as soon as the candidate can be controlled."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return deed()
        except (BranchError, KeyError):
            assert time.monotonic() < deadline, "it never runs"
            time.sleep(0.01)


def test_a_running_agent_is_paused_sent_a_message_and_stopped(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `branching watch`: the first gets a pause and a message, the second is stopped."""
    controller = RunController()
    begun: dict[int, str] = {}
    is_held = threading.Event()
    over = Pause.over

    async def noted(pause: Pause) -> None:
        if pause.is_on:
            is_held.set()
        await over(pause)

    monkeypatch.setattr(Pause, "over", noted)

    def model(messages: list[ModelMessage]) -> ModelResponse:
        told = prompts(messages)[-1]
        return call("shell", command="sleep 0.2") if told.startswith("work") else say(told)

    def note(event: Event) -> None:
        if event.kind == "started":
            begun[event.index] = event.branch

    def hand() -> None:
        when_it_runs(lambda: controller.pause(begun[0]))
        when_it_runs(lambda: controller.stop(begun[1]))
        assert is_held.wait(60)
        controller.tell(begun[0], "turn left")
        controller.pause(begun[0], is_on=False)

    agent = working_agent(model_of(model))
    candidates = [agent_candidate(agent, "work"), agent_candidate(agent, "work on")]
    hands = threading.Thread(target=hand)
    with controller.activate():
        hands.start()
        outcome = BestOfN(candidates, on_event=note)(real_workspace)
        hands.join()
    first, second = outcome.all_results
    assert (first.success, first.return_value) == (True, "turn left")
    assert not second.success


def test_an_agent_that_raises_is_a_failed_candidate(real_workspace: Workspace) -> None:
    def broken(messages: list[ModelMessage]) -> ModelResponse:
        raise RuntimeError("the model is away")

    candidate = agent_candidate(working_agent(model_of(broken)), "anything")
    outcome = Speculate([candidate])(real_workspace)
    assert not outcome.committed
    assert "the model is away" in str(outcome.all_results[0].exception)


def test_agents_work_over_http(real_workspace: Workspace) -> None:
    """The real client, with git in the branch: what it commits is there after the merge."""
    git = "git -c user.name=a -c user.email=a@b"

    def script(messages: list[dict[str, Any]]) -> Reply:
        if messages[-1]["role"] == "tool":
            return Reply(text=messages[-1]["content"])
        command = f"git init -q . && git add -A && {git} commit -qm made && git log --format=%s"
        return Reply(calls=(Call(name="shell", arguments={"command": command}),))

    with served(script) as server:
        agent = working_agent(server.model())
        candidate = agent_candidate(agent, "commit", success=succeeded)
        outcome = Speculate([candidate])(real_workspace)
    assert outcome.winner is not None, outcome.all_results
    assert outcome.winner.return_value == "made\n[exit 0]"
    assert (real_workspace.path / ".git" / "HEAD").is_file()
    assert len(server.requests) == 2


def test_the_loopback_server_streams() -> None:
    """The fake model server of these tests streams its answer."""

    async def run(url: str) -> str:
        parts = []
        async with agent.run_stream("hello") as result:
            async for text in result.stream_text(delta=True, debounce_by=None):
                parts.append(text)
        assert len(parts) > 1, url
        return "".join(parts).strip()

    with served(lambda messages: Reply(text="one two three four")) as server:
        agent = working_agent(server.model())
        assert asyncio.run(run(server.url)) == "one two three four"
    assert server.requests[0]["stream"] is True
