"""The text about a branch for its parent: its result, or a summary with the result.

    end_result   <branch_result><field>...</field>...</branch_result>, one element a field
    summarize    Branch summary: (written by the branch's model), then the result as JSON

A branch without `final_output` has no result and is summarized.
"""

from __future__ import annotations

from typing import Any, Literal
from xml.sax.saxutils import escape, quoteattr

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits

from branching.agent.acorn.tools import as_json

Merge = Literal["end_result", "summarize"]
MERGES = ("end_result", "summarize")
SUMMARIZE = (
    "Summarize for your parent, in a few sentences, what you have done since the branch began and "
    "what came of it. Call no tool."
)


def as_xml(result: BaseModel) -> str:
    """Returns `<branch_result>` with an element for each field; other types than text as JSON."""
    lines = ["<branch_result>"]
    for name in type(result).model_fields:
        value = getattr(result, name)
        text = value if isinstance(value, str) else as_json(value)
        lines.append(f"  <{name}>{escape(text)}</{name}>")
    return "\n".join([*lines, "</branch_result>"])


def as_summary(summary: str, result: BaseModel | None) -> str:
    """Returns the summary, with the result below it if there is one."""
    final = "null" if result is None else result.model_dump_json()
    return f"Branch summary:\n{summary}\n\nFinal result:\n{final}"


async def summarized(model: Any, history: list[Any]) -> str:
    """Asks the branch's model for a summary of its conversation."""
    agent: Agent[None, str] = Agent(model)
    asked = await agent.run(
        SUMMARIZE, message_history=history, usage_limits=UsageLimits(request_limit=2)
    )
    return asked.output


def listed(branches: list[Any]) -> str:
    """Returns the branches that can be begun, as XML, with what each wants to be given."""
    lines = ["<branches>"]
    for kind in branches:
        lines.append(f"  <branch name={quoteattr(kind.__name__)}>")
        lines.append(f"    <description>{escape(kind.description())}</description>")
        if kind.initial_input is not None:
            schema = kind.initial_input.model_json_schema()
            required = schema.get("required", [])
            lines.append("    <inputs>")
            for name, about in schema.get("properties", {}).items():
                is_required = str(name in required).lower()
                lines.append(
                    f"      <input name={quoteattr(name)} required={quoteattr(is_required)}>"
                    f"{escape(str(about.get('description', about.get('type', ''))))}</input>"
                )
            lines.append("    </inputs>")
        lines.append("  </branch>")
    return "\n".join([*lines, "</branches>"])
