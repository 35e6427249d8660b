"""How a tool fails: what happened, what still holds, and which tool to call next.

The library's errors are anticipated failures and go to the model in their own words; anything else
is a fault of ours, of which the protocol's library tells no more than that.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

from branching.errors import (
    AbortError,
    BranchError,
    BranchingError,
    BranchNotFoundError,
    BranchStaleError,
    CommitError,
    ConflictError,
    MountError,
    ProcessBranchError,
)

PATHS_MAX = 50

_REBASE = (
    "branch_rebase puts its changes on top of the present state of the workspace, and "
    "branch_commit does so by itself; branch_diff still shows them"
)
_NEXT: tuple[tuple[type[BranchingError], str], ...] = (
    (BranchNotFoundError, "branch_list shows the open branches"),
    (BranchStaleError, _REBASE),
    (AbortError, "branch_list shows whether it is still there"),
)
"""What to do about an error, by its class; conflicts are told apart by what they carry."""

_SYSTEM = {
    errno.ENOENT: "branch_files lists what is there",
    errno.EISDIR: "branch_files lists a directory",
    errno.EROFS: "the branch is frozen while its children are open (branch_list): commit or abort "
    "them first, or work in one of them",
    errno.ESTALE: f"another branch was committed first: {_REBASE}",
    errno.EDQUOT: "the branch has met its limit on disk space: delete something in it with "
    "branch_run, or branch_abort it",
    errno.ELOOP: "symbolic links are not followed: name the file itself (branch_run: readlink)",
    errno.EXDEV: "paths are relative to the workspace and stay in it",
}


def argument_words(tool: str, error: ValidationError, accepted: Mapping[str, Any]) -> str:
    """Returns what is wrong with the arguments of a call, for a model.

    Args:
        tool: The name of the tool that was called.
        error: What the tool's schema says of the arguments.
        accepted: The properties of the tool's input schema, by name.
    """
    faults = []
    for fault in error.errors(include_url=False):
        name = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "missing":
            faults.append(f"the argument {name!r} is missing")
        elif fault["type"] == "extra_forbidden":
            faults.append(f"there is no argument {name!r}")
        else:
            faults.append(f"{name}: {fault['msg']}")
    names = ", ".join(
        f"{name} (required)" if "default" not in schema else name
        for name, schema in accepted.items()
    )
    return (
        f"{tool} was not called: {'; '.join(faults)}. Nothing was done.\n"
        f"Next: call {tool} again with these arguments: {names or 'none'}"
    )


def error_words(error: BaseException) -> str | None:
    """Returns an anticipated error for a model, or None for a fault of this program."""
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, BranchingError):
        return words(error)
    if isinstance(error, OSError):
        return _system_words(error)
    if isinstance(error, ValueError) and not isinstance(error, (ValidationError, UnicodeError)):
        return f"{error}. Nothing was done."  # an impossible name, a number out of range
    return None


UNKNOWN_OUTCOME = (
    "an internal error interrupted the call, or the description of its result: it may have taken "
    "effect.\nNext: branch_list and branch_history show the state of the workspace; then tell the "
    "user"
)


def words(error: BranchingError) -> str:
    """Returns an error for a model."""
    lines = [error.message]
    lines += [f"  {path}" for path in error.paths[:PATHS_MAX]]
    if len(error.paths) > PATHS_MAX:
        lines.append(f"  and {len(error.paths) - PATHS_MAX} more")
    return "\n".join([*lines, f"Next: {_next(error)}"])


def _next(error: BranchingError) -> str:
    if isinstance(error, ConflictError) and error.paths:
        return (
            "look at both versions (branch_read of the branch, and of main), then branch_commit "
            "with force=true to take the branch's, with skip=true to leave these paths as they "
            "are, or branch_abort"
        )
    if isinstance(error, ConflictError):
        return _REBASE
    for kind, advice in _NEXT:
        if isinstance(error, kind):
            return advice
    if isinstance(error, (CommitError, MountError, ProcessBranchError)):
        return f"tell the user{f': {error.hint}' if error.hint else ''}"
    if isinstance(error, BranchError):
        return error.hint or "branch_list shows the open branches"
    return error.hint or "tell the user"


_SYSTEM_WORDS = {errno.EXDEV: "the path leads out of the workspace"}


def _system_words(error: OSError) -> str:
    what = (
        _SYSTEM_WORDS.get(error.errno or 0)
        or error.strerror
        or (str(error.args[1]) if len(error.args) > 1 else str(error))
    )
    where = f"{error.filename}: " if error.filename else ""
    advice = _SYSTEM.get(error.errno or 0)
    return f"{where}{what}. Nothing was changed." + (f"\nNext: {advice}" if advice else "")
