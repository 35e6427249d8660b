"""A fork copies a long conversation in another thread, so that the event loop does not wait."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from support.agents import ScriptedRunner, all_ended, branch_of, coordinator, run, specs

from branching.agent.json_codec import JsonCodec
from branching.agent.pydantic_ai import MessagesCodec

MESSAGES = 50
copied_by: list[str] = []
"""The thread of each copy of a message."""


class Message(dict[str, Any]):
    """A message that records its copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Message:
        copied_by.append(threading.current_thread().name)
        return Message(copy.deepcopy(dict(self), memo))


@pytest.fixture(autouse=True)
def _no_copies() -> None:
    copied_by.clear()


def messages() -> list[Message]:
    return [Message(role="user", content=str(number)) for number in range(MESSAGES)]


def test_a_request_copies_only_the_messages_since_the_last_one() -> None:
    per_request: list[int] = []

    async def asks(runner: ScriptedRunner) -> None:
        for number in range(3):
            runner.messages.append(Message(role="assistant", content=f"answer {number}"))
            copied_by.clear()
            runner.branch.capture(runner.messages)
            per_request.append(len(copied_by))

    async def work() -> None:
        made = coordinator(None, {"a": asks})
        await made.fork(specs("a"), parent_history=messages())
        await all_ended(made)
        branch = branch_of(made, "a")
        assert branch.partial_history == branch.history
        assert len(branch.history) == MESSAGES + 4
        await made.aclose()

    run(work())
    assert per_request == [1, 1, 1]


def test_the_branches_copies_of_the_parents_conversation_are_made_in_threads() -> None:
    async def ends(runner: ScriptedRunner) -> None:
        runner.messages[0]["content"] += runner.branch.spec.label

    async def work() -> None:
        history = messages()
        made = coordinator(None, {"a": ends, "b": ends})
        await made.fork(specs("a", "b"), parent_history=history)
        await all_ended(made)
        assert history[0]["content"] == "0"
        assert branch_of(made, "a").history[0]["content"] == "0a"
        assert branch_of(made, "b").history[0]["content"] == "0b"
        await made.aclose()

    run(work())
    of_the_loop = copied_by.count(threading.main_thread().name)
    assert of_the_loop == MESSAGES, "the parent's, once"
    assert len(copied_by) == 5 * MESSAGES, "and two for each branch"


def test_conversations_are_dumped_in_threads() -> None:
    """At each request, in a fork and at its end: a long conversation takes a while to dump."""
    dumped_by: list[str] = []

    class Codec(JsonCodec):
        def dump(self, history: Any) -> bytes:
            dumped_by.append(threading.current_thread().name)
            return super().dump(history)

    async def asks(runner: ScriptedRunner) -> None:
        for number in range(3):
            await runner.say(f"answer {number}")

    async def work() -> None:
        made = coordinator(None, {"a": asks, "b": asks}, codec=Codec())
        await made.fork(specs("a", "b"), parent_history=messages())
        await all_ended(made)
        await made.detach()
        await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
        await made.aclose()

    run(work())
    assert len(dumped_by) > 4
    assert threading.main_thread().name not in dumped_by


@pytest.mark.parametrize("codec", [JsonCodec(), MessagesCodec()], ids=["JSON", "messages"])
def test_a_changed_message_is_copied_again_and_earlier_copies_stay(codec: Any) -> None:
    is_json = isinstance(codec, JsonCodec)
    first: Any = (
        {"role": "user", "content": "one"}
        if is_json
        else ModelRequest(parts=[UserPromptPart(content="one")])
    )
    second: Any = (
        {"role": "assistant", "content": "two"}
        if is_json
        else ModelResponse(parts=[TextPart(content="two")])
    )
    earlier = codec.copy([first, second])
    if is_json:
        second["content"] = "changed"
    else:
        second.parts[0].content = "changed"
    later = codec.copy_after([first, second, first], earlier)
    assert later == [first, second, first]
    assert earlier[1] != second
    assert later[0] is earlier[0]
    assert later[1] is not second
    assert later[2] is not first


def test_values_that_cannot_be_compared_are_copied() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    history = [{"role": "tool", "content": Odd()}]
    earlier = JsonCodec().copy(history)
    [later] = JsonCodec().copy_after(history, earlier)
    assert later is not history[0]
    assert later is not earlier[0]
