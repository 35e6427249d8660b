"""What branches did, step by step: their calls of tools beside each other.

The first branch is the measure; each other one is aligned with it as lines of a text are.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from branching.agent.protocols import ToolCall


@dataclass(frozen=True, kw_only=True)
class ToolStep:
    """One step of the comparison of two branches."""

    kind: Literal["same", "only_first", "only_second"]
    call: ToolCall


@dataclass(frozen=True, kw_only=True)
class ToolDiff:
    """The calls of all branches of a fork, compared."""

    common_prefix: int
    """So many first calls are the same in all branches."""
    steps: Mapping[tuple[str, str], tuple[ToolStep, ...]]
    """For the first branch and each other one, by their ids."""
    counts: Mapping[str, Mapping[str, int]]
    """How often each branch called each tool."""


def diff_tool_calls(calls: Mapping[str, Sequence[ToolCall]]) -> ToolDiff:
    """Compares calls by branch id; order, name and arguments count."""
    ids = list(calls)
    prefix = 0
    for together in zip(*calls.values(), strict=False):
        if len(set(together)) > 1:
            break
        prefix += 1
    return ToolDiff(
        common_prefix=prefix if ids else 0,
        steps={(ids[0], other): _steps(calls[ids[0]], calls[other]) for other in ids[1:]},
        counts={
            branch: {
                name: sum(call.name == name for call in made)
                for name in sorted({call.name for call in made})
            }
            for branch, made in calls.items()
        },
    )


def _steps(first: Sequence[ToolCall], second: Sequence[ToolCall]) -> tuple[ToolStep, ...]:
    steps: list[ToolStep] = []
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    for tag, start, end, other_start, other_end in matcher.get_opcodes():
        if tag == "equal":
            steps += [ToolStep(kind="same", call=call) for call in first[start:end]]
            continue
        steps += [ToolStep(kind="only_first", call=call) for call in first[start:end]]
        steps += [ToolStep(kind="only_second", call=call) for call in second[other_start:other_end]]
    return tuple(steps)
