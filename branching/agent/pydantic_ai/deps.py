"""The dependencies of a branch's run: the parent's, with what it is to have of its own.

Dependencies are whatever the agent's author made them. What is known of them by name is forked as
the isolation says; the rest is shared, as one object may be by two runs of an agent anyway:

    clone_for_branch(isolation)  if there is such a method, it decides alone
    todos                        "copy": an empty list; else the parent's
    message_queue                "isolated": a new one; "shared": the parent's
    team_bus                     "shared": the parent's; "isolated": a new one
    fork_coordinator             the branch's own, made when it forks

A new value is made by its class without arguments. If the class needs arguments, the parent's value
is copied and the copy is emptied by its method `clear`.

Frozen dependencies are forked as well, because the branch gets a copy. The parent's frozen object
is never written to: the conversation identifies its fork instead.
"""

from __future__ import annotations

import copy
from typing import Any

from branching.agent.errors import ForkStateError
from branching.agent.types import BranchIsolation

COORDINATOR = "fork_coordinator"
_KNOWN = ("todos", "message_queue", "team_bus", COORDINATOR)


def branch_deps(deps: Any, isolation: BranchIsolation) -> Any:
    """Returns the dependencies for one branch.

    Raises:
        ForkStateError: A value that the branch is to have of its own can be neither made nor
            copied. The parent's dependencies are unchanged.
    """
    if hasattr(deps, "clone_for_branch"):
        return deps.clone_for_branch(isolation)
    if deps is None or not any(hasattr(deps, name) for name in _KNOWN):
        return deps
    is_fresh = {
        "todos": isolation.todos == "copy",
        "message_queue": isolation.message_queue == "isolated",
        "team_bus": isolation.team_bus == "isolated",
    }
    changed = {
        name: _empty(name, getattr(deps, name))
        for name in is_fresh
        if is_fresh[name] and getattr(deps, name, None) is not None
    }
    if hasattr(deps, COORDINATOR):
        changed[COORDINATOR] = None
    return _replaced(deps, changed)


def keep_coordinator(deps: Any, coordinator: object) -> None:
    """Sets `deps.fork_coordinator`, unless the dependencies have no such field or are frozen."""
    if hasattr(deps, COORDINATOR):
        try:
            setattr(deps, COORDINATOR, coordinator)
        except (AttributeError, ValueError):  # pydantic reports a frozen model by a ValueError
            return


def _empty(name: str, value: Any) -> Any:
    kind = type(value)
    try:
        return kind()
    except Exception:
        pass  # the class needs arguments
    try:
        made = copy.deepcopy(value)
        made.clear()
    except Exception as error:
        raise ForkStateError(
            f"the dependencies' {name!r} cannot be recreated for a branch: {kind.__name__} needs "
            f"arguments, and a copy cannot be emptied ({error})",
            hint="give the dependencies a method clone_for_branch(isolation), "
            "or share the value with the branches by the isolation",
        ) from error
    return made


def _replaced(deps: Any, changed: dict[str, Any]) -> Any:
    """Returns a copy of the dependencies with other values, also of a frozen class."""
    if isinstance(deps, tuple) and hasattr(deps, "_replace"):
        return deps._replace(**changed)
    own = copy.copy(deps)
    for name, value in changed.items():
        try:
            setattr(own, name, value)
        except (AttributeError, ValueError):
            object.__setattr__(own, name, value)  # nothing else has seen the copy yet
    return own
