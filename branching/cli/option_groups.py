"""Options that several commands share, declared once as a dataclass.

A command takes such a dataclass as one parameter; on the command line its fields are options:

    @dataclass(frozen=True, kw_only=True)
    class SearchOptions:
        timeout: TimeoutOption = None
        json: JsonOption = False

    @grouped
    def speculate(options: SearchOptions, candidates: ... = None) -> None: ...

The options are in the help at the position of the parameter. Typer reads a function's signature, so
the command gets a signature with the fields in place of the dataclass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Returns the function as a command whose dataclass parameters are spread into options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        annotation = hints[parameter.name]
        if is_dataclass(annotation) and isinstance(annotation, type):
            groups[parameter.name] = annotation
            parameters += _spread(annotation)
        else:
            parameters.append(
                parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY)
            )

    @wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _spread(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found = []
    # What a class inherits comes after its own: fields of a dataclass stand the other way round.
    own = [field for field in fields(group) if field.name in group.__annotations__]
    for field in own + [field for field in fields(group) if field not in own]:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert default is not MISSING, f"{group.__name__}.{field.name} needs a default"
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default,
                annotation=hints[field.name],
            )
        )
    return found
