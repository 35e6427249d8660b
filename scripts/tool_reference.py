"""The reference of the tools, as a client of `branching mcp` lists them: docs/mcp-reference.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio

from branching.mcp.tools import registered_tools

if TYPE_CHECKING:
    from collections.abc import Iterator


def tools() -> str:
    """Returns each tool with its arguments and its answer."""
    return "\n".join(map(described, anyio.run(registered_tools)))


def described(tool: Any) -> str:
    """Returns the section of one tool."""
    hints = {
        "read-only": tool.annotations.read_only_hint,
        "destructive": tool.annotations.destructive_hint,
        "idempotent": tool.annotations.idempotent_hint,
        "reaches outside": tool.annotations.open_world_hint,
    }
    lines = [f"### {tool.name}", "", " ".join(tool.description.split()), ""]
    lines += [f"Hints: {', '.join(word for word, holds in hints.items() if holds) or 'none'}.", ""]
    if arguments := tool.input_schema["properties"]:
        lines += ["| argument | type | default | |", "|---|---|---|---|"]
        for name, schema in arguments.items():
            needed = name in tool.input_schema.get("required", [])
            default = "required" if needed else f"`{json.dumps(schema.get('default'))}`"
            lines.append(f"| `{name}` | {kind(schema)} | {default} | {schema.get('description', '')} |")
        lines.append("")
    lines += ["| answer | type | |", "|---|---|---|"]
    for name, schema in fields(tool.output_schema, tool.output_schema.get("$defs", {})):
        lines.append(f"| `{name}` | {kind(schema)} | {schema.get('description', '')} |")
    return "\n".join([*lines, ""])


def fields(model: dict[str, Any], models: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the fields of an answer, and those of the models in it under their full names."""
    for name, schema in model["properties"].items():
        yield prefix + name, schema
        is_list = schema.get("type") == "array"
        inner = schema["items"] if is_list else schema
        if "$ref" in inner:
            yield from fields(models[named(inner)], models, f"{prefix}{name}{'[]' if is_list else ''}.")


def named(schema: dict[str, Any]) -> str:
    """Returns the name of the model that a schema refers to."""
    return str(schema["$ref"].rsplit("/", 1)[1])


def kind(schema: dict[str, Any]) -> str:
    """Returns a schema's type in a word or two."""
    if "anyOf" in schema:
        return " or ".join(kind(each) for each in schema["anyOf"])
    if "$ref" in schema:
        return named(schema)
    if "enum" in schema:
        return ", ".join(f'"{value}"' for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {kind(schema['items'])}"
    return str(schema.get("type", "any"))
