"""Methods as tools, and their descriptions for branches that inherit them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic_ai import Tool

MARK = "_is_branching_tool"
FINISH = "__finish__"
BRANCH = "branch"
CALL_PARENT = "call_parent_tool"
OWN_OF_A_RUN = (FINISH, BRANCH, CALL_PARENT)
"""Tools that only one run may call."""
F = TypeVar("F", bound=Callable[..., Any])


def tool(function: F) -> F:
    """Makes a method of a Module a tool: its name, docstring and annotations are the model's."""
    setattr(function, MARK, True)
    return function


def own_tools(module: object) -> dict[str, Callable[..., Any]]:
    """Returns the tools that a module has itself: its methods marked so, and those in `tools`."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in inspect.getmembers(module, callable):
        if getattr(value, MARK, False):
            found[name] = value
    for function in getattr(type(module), "tools", ()):
        found[function.__name__] = function
    for name in OWN_OF_A_RUN:
        if name in found:
            raise TypeError(f"a tool cannot be named {name}: the name is reserved")
    return found


def described(tools: Mapping[str, Callable[..., Any]]) -> str:
    """Returns a JSON list of tools: name, description, parameters."""
    entries = []
    for name, function in tools.items():
        definition = Tool(function, takes_ctx=False, name=name).function_schema
        entries.append(
            {
                "name": name,
                "description": inspect.getdoc(function) or "",
                "parameters": definition.json_schema,
            }
        )
    return json.dumps(entries)


async def called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Calls a tool with checked arguments; returns its result as text.

    Raises ValueError for arguments that do not fit, and what the tool raises.
    """
    try:
        result = validate_call(function)(**arguments)
    except ValidationError as error:
        raise ValueError(str(error)) from error
    if inspect.isawaitable(result):
        result = await result
    return result if isinstance(result, str) else as_json(result)


def as_json(value: Any) -> str:
    """Returns any value that pydantic can say as JSON."""
    return TypeAdapter(Any).dump_json(value).decode()
