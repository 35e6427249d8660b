"""How a tool fails: what happened, what still holds, and which tool to call next.

The library's errors are anticipated failures and go to the model in their own words; anything else
is a fault of ours, of which the protocol's library tells no more than that.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from mcp.server.mcpserver.exceptions import ToolError

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

P = ParamSpec("P")
R = TypeVar("R")

PATHS_MAX = 50

_NEXT: tuple[tuple[type[BranchingError], str], ...] = (
    (BranchNotFoundError, "branch_list shows the open branches"),
    (BranchStaleError, "branch_abort it, and try again in a new one (branch_create)"),
    (AbortError, "branch_list shows whether it is still there"),
)
"""What to do about an error, by its class; conflicts are told apart by what they carry."""

_SYSTEM = {
    errno.ENOENT: "branch_files lists what is there",
    errno.EISDIR: "branch_files lists a directory",
    errno.EROFS: "the branch is frozen while its children are open (branch_list): commit or abort "
    "them first, or work in one of them",
    errno.ESTALE: "another branch was committed first: branch_abort this one, and try again in a "
    "new one (branch_create)",
    errno.EDQUOT: "the branch has met its limit on disk space: delete something in it with "
    "branch_run, or branch_abort it",
    errno.ELOOP: "symbolic links are not followed: name the file itself (branch_run: readlink)",
    errno.EXDEV: "paths are relative to the workspace and stay in it",
}


def told(function: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Returns the tool with its failures told to the model."""

    @wraps(function)
    async def tool(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await function(*args, **kwargs)
        except BranchingError as error:
            raise ToolError(words(error)) from error
        except OSError as error:
            raise ToolError(_system_words(error)) from error
        except ValueError as error:  # an impossible name, a limit that is none
            raise ToolError(f"{error}. Nothing was done.") from error

    return tool


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
        return "branch_abort it, and try again in a new one (branch_create)"
    for kind, advice in _NEXT:
        if isinstance(error, kind):
            return advice
    if isinstance(error, (CommitError, MountError, ProcessBranchError)):
        return f"tell the user{f': {error.hint}' if error.hint else ''}"
    if isinstance(error, BranchError):
        return error.hint or "branch_list shows the open branches"
    return error.hint or "tell the user"


def _system_words(error: OSError) -> str:
    what = error.strerror or (str(error.args[1]) if len(error.args) > 1 else str(error))
    where = f"{error.filename}: " if error.filename else ""
    advice = _SYSTEM.get(error.errno or 0)
    return f"{where}{what}. Nothing was changed." + (f"\nNext: {advice}" if advice else "")
