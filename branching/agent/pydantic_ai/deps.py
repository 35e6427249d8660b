"""The dependencies of a branch's run: the parent's, with what it is to have of its own.

Dependencies are whatever the agent's author made them. What is known of them by name is forked as
the isolation says; the rest is shared, as one object may be by two runs of an agent anyway:

    clone_for_branch(isolation)  if there is such a method, it decides alone
    todos                        "copy": an empty list; else the parent's
    message_queue                "isolated": a new one; "shared": the parent's
    team_bus                     "shared": the parent's; "isolated": a new one
    fork_coordinator             the branch's own, made when it forks
"""

from __future__ import annotations

import copy
from typing import Any

from branching.agent.types import BranchIsolation

COORDINATOR = "fork_coordinator"
_KNOWN = ("todos", "message_queue", "team_bus", COORDINATOR)


def branch_deps(deps: Any, isolation: BranchIsolation) -> Any:
    """Returns the dependencies for one branch."""
    if hasattr(deps, "clone_for_branch"):
        return deps.clone_for_branch(isolation)
    if deps is None or not any(hasattr(deps, name) for name in _KNOWN):
        return deps
    own = copy.copy(deps)
    fresh = {
        "todos": isolation.todos == "copy",
        "message_queue": isolation.message_queue == "isolated",
        "team_bus": isolation.team_bus == "isolated",
    }
    for name, is_fresh in fresh.items():
        value = getattr(deps, name, None)
        if is_fresh and value is not None:
            setattr(own, name, type(value)())
    if hasattr(own, COORDINATOR):
        setattr(own, COORDINATOR, None)
    return own
