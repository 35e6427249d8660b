"""A chat with scripted agents on a real workspace, without a model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.fork_log import ForkLog
from branching.agent.judge import Choice
from branching.agent.protocols import Judgement, Question, RunOutcome
from branching.agent.types import Usage
from branching.fs import Workspace
from branching.tui.chat.protocols import Ask, Hear, Reply
from branching.tui.chat.pydantic_agent import Shell
from branching.tui.chat.session import ChatSession
from branching.tui.chat.settings import SettingsFile

REQUEST = Usage(usd=0.02, tokens=100)


def turn(history: Any, prompt: str, said: str) -> list[dict[str, str]]:
    """Returns a conversation with one more turn."""
    return [
        *(history or []),
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": said},
    ]


@dataclass
class Script:
    """The agents' behaviour: words of their prompts are commands. It outlives the agents."""

    controlled: list[tuple[str, str]] = field(default_factory=list)
    """Messages sent to running branches, with the branches' labels."""
    models: dict[str, str | None] = field(default_factory=dict)
    goes_on: set[str] = field(default_factory=set)
    """Labels of branches that stop waiting."""
    session: ChatSession | None = None

    async def act(self, who: str, prompt: str, directory: Path | None, hear: Hear) -> str:
        """Does `write FILE`, `wait` or `fail`."""
        hear(f"{who} hears {prompt}\n")
        words = prompt.split()
        if words[:1] == ["write"] and directory is not None:
            (directory / words[1]).write_text(f"{who}\n" * 3)
        while "wait" in words and who not in self.goes_on:
            await asyncio.sleep(0.01)
        if "fail" in words:
            raise ValueError(f"{who} was told to fail")
        hear(f"{who} has done it\n")
        return f"{who} did: {prompt}"


class ScriptedRunner:
    """The runner of one branch."""

    can_pause = True

    def __init__(self, script: Script, branch: BranchRuntime) -> None:
        self._script = script
        self._branch = branch

    async def run(self, prompt: str, history: Any) -> RunOutcome:
        branch, script = self._branch, self._script
        label = branch.spec.label
        script.models[label] = branch.spec.model
        assert script.session is not None
        session = script.session
        branch.capture(turn(history, prompt, "…"))
        with branch.request(REQUEST) as meter:
            meter.used(REQUEST)
        if "ask" in prompt.split():
            answer = await branch.ask("shell", "rm -rf build")
            session.heard(branch.id, f"the answer is {answer}\n")
        hear = lambda text: session.heard(branch.id, text)  # noqa: E731
        said = await script.act(label, prompt, branch.path, hear)
        return RunOutcome(history=turn(history, prompt, said), final_message=said)

    def steer(self, text: str) -> None:
        self._script.controlled.append((self._branch.spec.label, text))

    async def stop(self) -> None:
        pass


class ScriptedVoice:
    """The agent of the parent conversation."""

    name = "scripted"

    def __init__(self, script: Script) -> None:
        self._script = script

    async def say(self, prompt: str, history: Any, hear: Hear, ask: Ask) -> Reply:
        if "ask" in prompt.split():
            hear(f"the answer is {await ask('shell', 'make clean')}\n")
        said = await self._script.act("parent", prompt, None, hear)
        return Reply(history=turn(history, prompt, said), text=said)


@dataclass
class ScriptedJudge:
    """Chooses a label with a fixed confidence."""

    label: str = "one"
    confidence: float = 0.9
    reasoning: str = "is best"
    asked: int = 0

    async def __call__(self, question: Question) -> Judgement:
        self.asked += 1
        [winner] = [o.branch_id for o in question.outcomes if o.label == self.label]
        verdict = Choice(
            winner_branch_id=winner,
            confidence=self.confidence,
            reasoning=f"{self.label} {self.reasoning}",
        )
        return Judgement(verdict=verdict, effective_confidence=self.confidence)


def new_session(
    space: Workspace, settings: Path, script: Script, judge: ScriptedJudge | None = None
) -> ChatSession:
    """Returns a chat on a workspace."""
    coordinator = ForkCoordinator(
        runner=lambda branch: ScriptedRunner(script, branch),
        place=space,
        checkpoint_store=InMemoryCheckpointStore(),
        judge=judge,
    )
    script.session = ChatSession(
        coordinator,
        ScriptedVoice(script),
        settings=SettingsFile(settings),
        shell=Shell(coordinator, seen_at=space.seen_at),
        history=[],
        log=ForkLog(coordinator, space, "chat", is_behind=True).__enter__(),
    )
    return script.session
