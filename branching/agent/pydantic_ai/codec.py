"""What a conversation of pydantic-ai is, for the coordinator that never looks inside one.

A conversation is a list of `ModelMessage`. Copies are deep where a message can change; dumps are
pydantic-ai's own JSON. A message may name the workspace it was made in; a branch's is gone after
the merge, so it is put back to the one that the conversation started from.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_ai.messages import (
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
    WorkspaceRef,
)

from branching.agent.json_codec import copied_after, preview_of
from branching.agent.protocols import ToolCall
from branching.agent.pydantic_ai.workspace import PROVIDER

STUCK_LOOP_MARKERS = ("stuck loop", "stuck-loop", "stuck in a loop")
"""What tools that notice a model repeating itself write into its history."""

Messages = list[ModelMessage]


class MessagesCodec:
    """A list of pydantic-ai's messages."""

    def dump(self, history: Any) -> bytes:
        return ModelMessagesTypeAdapter.dump_json(list(history or []))

    def load(self, data: bytes) -> Messages:
        return ModelMessagesTypeAdapter.validate_json(data)

    def copy(self, history: Any) -> Messages:
        return copy.deepcopy(list(history or []))

    def copy_after(self, history: Any, earlier: Any) -> Messages:
        return copied_after(history or [], earlier or [])

    def turns(self, history: Any) -> int:
        return sum(isinstance(message, ModelResponse) for message in history or [])

    def preview(self, history: Any) -> str:
        return preview_of(last_text(history or []))

    def tool_calls(self, history: Any) -> Sequence[ToolCall]:
        return [
            ToolCall(name=part.tool_name, arguments=part.args_as_json_str())
            for message in history or []
            if isinstance(message, ModelResponse)
            for part in message.parts
            if isinstance(part, ToolCallPart)
        ]

    def retries(self, history: Any) -> int:
        return count_retry_parts(history or [])

    def stuck_loop_hits(self, history: Any) -> int:
        return count_stuck_loop_hits(history or [])


def count_retry_parts(messages: Sequence[ModelMessage]) -> int:
    """Counts every part that asked the model to try again; newer versions of pydantic-ai say it in
    what the tool returned."""
    return sum(
        isinstance(part, RetryPromptPart) or getattr(part, "outcome", "") == "retried"
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
    )


def count_stuck_loop_hits(messages: Sequence[ModelMessage]) -> int:
    """Counts the parts in which a tool, or a prompt, says that the model repeats itself."""
    texts = [
        str(part.content).lower()
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, (ToolReturnPart, UserPromptPart, RetryPromptPart))
    ]
    return sum(any(marker in text for marker in STUCK_LOOP_MARKERS) for text in texts)


def last_text(messages: Sequence[ModelMessage]) -> str:
    """Returns the text of the last message that has any."""
    for message in reversed(messages):
        for part in reversed(message.parts):
            if isinstance(part, TextPart):
                return part.content
            if isinstance(part, (ToolReturnPart, UserPromptPart)):
                return str(part.content)
            if isinstance(part, ToolCallPart):
                return f"{part.tool_name} {part.args_as_json_str()}"
    return ""


def workspace_of(messages: Sequence[ModelMessage]) -> WorkspaceRef | None:
    """Returns the workspace that the conversation was in last."""
    for message in reversed(messages):
        if isinstance(message, ModelResponse):
            return message.workspace_ref
    return None


def moved(messages: Sequence[ModelMessage], home: WorkspaceRef | None) -> Messages:
    """Returns the messages; those that were made in a branch say `home` in its place."""
    return [
        replace(message, workspace_ref=home)
        if isinstance(message, ModelResponse)
        and message.workspace_ref is not None
        and message.workspace_ref.provider == PROVIDER
        else message
        for message in messages
    ]
