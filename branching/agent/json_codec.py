"""A conversation of plain JSON: a list of messages `{"role": …, "content": …}`.

For command-line programs, tests, and other code with this format. A message may have `tool_calls`,
each with `name` and `arguments`, and `"retry": true` if the model was asked again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from branching.agent.protocols import History, ToolCall

PREVIEW_CHARACTERS_MAX = 120
STUCK_MARK = "stuck loop"
"""Text of a warning that the model repeats itself."""


def preview_of(text: str) -> str:
    """Returns the beginning of a message on one line."""
    return " ".join(text.split())[:PREVIEW_CHARACTERS_MAX]


def copied_after(history: Sequence[Any], earlier: Sequence[Any]) -> list[Any]:
    """Returns a deep copy of the messages that shares equal ones with an earlier copy.

    A conversation grows at its end, so the cost of comparing is all that most messages cost. One
    that has been changed since, or cannot be compared, is copied again; `earlier` stays as it is.
    """
    copies = [
        theirs if _is_equal(message, theirs) else copy.deepcopy(message)
        for message, theirs in zip(history, earlier, strict=False)
    ]
    return [*copies, *copy.deepcopy(list(history[len(copies) :]))]


def _is_equal(message: object, other: object) -> bool:
    try:
        return bool(message == other)
    except Exception:  # of a value in it, such as an array of numbers
        return False


class JsonCodec:
    """A list of JSON objects, one a message."""

    def dump(self, history: History) -> bytes:
        return json.dumps(history).encode()

    def load(self, data: bytes) -> History:
        history = json.loads(data)
        if not isinstance(history, list) or not all(isinstance(m, dict) for m in history):
            raise ValueError("a conversation is a list of JSON objects")
        return history

    def copy(self, history: History) -> History:
        return copy.deepcopy(history)

    def copy_after(self, history: History, earlier: History) -> History:
        return copied_after(history, earlier)

    def turns(self, history: History) -> int:
        return sum(message.get("role") == "assistant" for message in history)

    def preview(self, history: History) -> str:
        last = str(history[-1].get("content", "")) if history else ""
        return preview_of(last)

    def tool_calls(self, history: History) -> Sequence[ToolCall]:
        return [
            ToolCall(name=str(call["name"]), arguments=json.dumps(call.get("arguments", {})))
            for message in history
            for call in message.get("tool_calls", ())
        ]

    def retries(self, history: History) -> int:
        return sum(bool(message.get("retry")) for message in history)

    def stuck_loop_hits(self, history: History) -> int:
        return sum(STUCK_MARK in str(message.get("content", "")).lower() for message in history)
