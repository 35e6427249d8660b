"""Error messages of tools: what happened, what state things are in, and what to call next.

Exceptions of `branching.errors` are reported to the model with their message. Other exceptions are
faults of this program; the protocol's library reports only that there was one.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

from branching._caller import for_caller
from branching.errors import (
    AbortError,
    BranchError,
    BranchingError,
    BranchNotFoundError,
    BranchStaleError,
    CommitError,
    ConflictError,
    MemoryBranchError,
    MountError,
    ProcessBranchError,
)
from branching.fs.control_client import RequestRefused

PATHS_MAX = 50

_REBASE = (
    "branch_rebase puts its changes on top of the present state of the workspace, and "
    "branch_commit does so by itself; branch_diff still shows them"
)
_LIST = "branch_list shows the open branches"
_AGAIN = "correct the arguments, then call the tool again"
_NEXT: tuple[tuple[type[BranchingError], str], ...] = (
    (BranchNotFoundError, _LIST),
    (BranchStaleError, _REBASE),
    (AbortError, "branch_list shows whether it is still there"),
)
"""The next step for an error class. Conflicts depend on whether they have paths."""
_NEXT_OF_KIND = {
    "not_found": "branch_history lists the commits that can be undone and redone",
    "frozen": f"{_LIST}: commit or abort those below it first; to undo or redo a commit beside "
    "open branches, call again with force=true, which makes them stale",
}
"""The next step for an error kind of the daemon."""

_SYSTEM = {
    errno.ENOENT: "branch_files lists what is there",
    errno.ENOTDIR: "branch_files lists what is there",
    errno.EISDIR: "branch_files lists a directory",
    errno.EINVAL: "give the path of an ordinary file below the root of the workspace, such as "
    "src/main.py",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EPERM: "use another path",
    errno.EACCES: "use another path, or ask the user for access",
    errno.EROFS: "the branch is frozen while its children are open (branch_list): commit or abort "
    "them first, or work in one of them",
    errno.ESTALE: f"another branch was committed first: {_REBASE}",
    errno.EDQUOT: "the branch has met its limit on disk space: delete something in it with "
    "branch_run, or branch_abort it",
    errno.ELOOP: "symbolic links are not followed: name the file itself (branch_run: readlink)",
    errno.EXDEV: "paths are relative to the workspace and stay in it",
    errno.ENOSPC: "the disk is full: branch_abort of a branch frees what it wrote; or ask the user",
}


def argument_words(tool: str, error: ValidationError, accepted: Mapping[str, Any]) -> str:
    """Returns a message for a model about the invalid arguments of a call.

    Args:
        tool: The name of the tool that was called.
        error: The result of validating the arguments against the tool's schema.
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
    return refused_arguments(
        tool, faults, {name: "default" not in schema for name, schema in accepted.items()}
    )


def refused_arguments(name: str, faults: Sequence[str], accepted: Mapping[str, bool]) -> str:
    """Returns a message for a model about the invalid arguments of a tool or a prompt.

    Args:
        name: The name of the tool or the prompt.
        faults: What is wrong.
        accepted: The names of its arguments, and whether they are required.
    """
    names = ", ".join(
        f"{each} (required)" if is_required else each for each, is_required in accepted.items()
    )
    return (
        f"{name} was not called: {'; '.join(faults)}. Nothing was done.\n"
        f"Next: call {name} again with these arguments: {names or 'none'}"
    )


def no_such(what: str, name: str, known: Sequence[str]) -> str:
    """Returns a message for a model about a tool or a prompt that does not exist."""
    near = get_close_matches(name, known, n=3)
    choice = f"; similar: {', '.join(near)}" if near else f"; there are: {', '.join(known)}"
    return f"this server has no {what} {name!r}{choice}. Nothing was done.\nNext: call one of these"


def error_words(error: BaseException) -> str | None:
    """Returns an error's message for a model, None for a fault of this program."""
    if isinstance(error, ToolError):
        return str(error)
    if isinstance(error, BranchingError):
        return words(error)
    if isinstance(error, OSError):
        return _system_words(error)
    if isinstance(error, ValueError) and not isinstance(error, (ValidationError, UnicodeError)):
        # An impossible name, a number out of range.
        return f"{error}. Nothing was done.\nNext: {_AGAIN}"
    return None


UNKNOWN_OUTCOME = (
    "an internal error interrupted the call, or the description of its result: it may have taken "
    "effect.\nNext: branch_list and branch_history show the state of the workspace; then tell the "
    "user"
)


def words(error: BranchingError) -> str:
    """Returns an error's message for a model, with the names of commands and paths on the host."""
    found_none = isinstance(error, BranchNotFoundError)
    lines = [f"{error.message}. Nothing was changed." if found_none else error.message]
    lines += [f"  {path}" for path in error.paths[:PATHS_MAX]]
    if len(error.paths) > PATHS_MAX:
        lines.append(f"  and {len(error.paths) - PATHS_MAX} more")
    return for_caller("\n".join([*lines, f"Next: {_next(error)}"]))


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
    refused = error.__cause__
    if isinstance(refused, RequestRefused):
        if refused.kind == "usage":
            return f"{_AGAIN}: {error.hint}" if error.hint else _AGAIN
        if refused.kind in _NEXT_OF_KIND:
            return _NEXT_OF_KIND[refused.kind]
    if isinstance(error, MemoryBranchError):
        return error.hint or "session_end ends the session; session_run starts another"
    if isinstance(error, (CommitError, MountError, ProcessBranchError)):
        return f"tell the user{f': {error.hint}' if error.hint else ''}"
    if isinstance(error, BranchError):
        return error.hint or _LIST
    return error.hint or "tell the user"


_SYSTEM_WORDS = {errno.EXDEV: "the path leads out of the workspace"}


def _system_words(error: OSError) -> str:
    what = (
        _SYSTEM_WORDS.get(error.errno or 0)
        or error.strerror
        or (str(error.args[1]) if len(error.args) > 1 else str(error))
    )
    where = f"{error.filename}: " if error.filename else ""
    advice = _SYSTEM.get(error.errno or 0, "tell the user")
    return for_caller(f"{where}{what}. Nothing was changed.\nNext: {advice}")
