"""`branching hook`: what a coding agent calls by itself, with JSON on standard input.

Claude Code calls its hooks WorktreeCreate and WorktreeRemove instead of `git worktree`:

    WorktreeCreate   {"cwd": "/project", "name": "fix", …}    prints the directory to work in
    WorktreeRemove   {"cwd": …, "worktree_path": "/tmp/…", …}

Its documents call the name `worktree_name`; both are read. Source: the hooks reference of Claude
Code, and payloads that its users recorded.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.create import close_mount, create_mounted, refuse_paths_in_container
from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import WorkspaceOption
from branching.cli.workspace import opened_workspace
from branching.errors import BranchNotFoundError, MountError

PROJECT_VARIABLE = "CLAUDE_PROJECT_DIR"
"""Claude Code sets it for hooks: the directory in which it was started."""
_PREFIX = "worktree-"
"""Of the branches, so that `branching ls` tells them from others."""
_ACTIONS = (["worktree", "create"], ["worktree", "remove"])


def hook(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="worktree create | worktree remove",
            help="The event: create a worktree, or remove it.",
            show_default=False,
        ),
    ],
    workspace: WorkspaceOption = None,
) -> None:
    """Serve Claude Code's hooks WorktreeCreate and WorktreeRemove.

    create creates or finds the branch worktree-NAME and prints its directory. It has all files of
    the project, including those that git ignores. remove drops a branch without changes, and
    keeps one with changes for branching diff, commit and abort.

    Example: branching hook worktree create <payload.json
    """
    with handle_errors(json=False):
        if words not in _ACTIONS:
            raise UsageFault("write branching hook worktree create, or remove")
        refuse_paths_in_container("hook")
        payload = _payload()
        if words[1] == "create":
            print(_created(payload, workspace))
        else:
            _remove(payload)


def _payload() -> dict[str, object]:
    if sys.stdin.isatty():
        raise UsageFault("the hook reads JSON on standard input")
    try:
        payload = json.load(sys.stdin)
    except ValueError as error:
        raise UsageFault(f"standard input is not JSON: {error}") from error
    if not isinstance(payload, dict):
        raise UsageFault("standard input is not a JSON object")
    return payload


def _text(payload: dict[str, object], *keys: str) -> str:
    for key in keys:
        value = payload.get(key)
        if isinstance(value, str) and value:
            return value
    raise UsageFault(f"the JSON on standard input lacks the string {keys[0]!r}")


def _created(payload: dict[str, object], workspace: Path | None) -> Path:
    # A name may be a path of words, which a branch's may not.
    name = _PREFIX + re.sub(r"[/\x00-\x1f\x7f]+", "-", _text(payload, "name", "worktree_name"))
    if workspace is None:
        workspace = Path(os.environ.get(PROJECT_VARIABLE) or _text(payload, "cwd"))
    with opened_workspace(workspace) as space:
        return create_mounted(space, name, exist_ok=True)


def _remove(payload: dict[str, object]) -> None:
    from branching.fs import Workspace

    path = Path(_text(payload, "worktree_path"))
    try:
        space = Workspace(path)
    except (MountError, BranchNotFoundError):
        note(f"{path} is in no open branch: there is nothing to remove")
        return
    with space:
        base = space.base
        name = Path(space.branch_path).name
        branch = space.reopen(name)
        count = len(branch.diff())
        if count:
            note(
                f"kept branch {name} with {count} changed paths; branching commit {name} or "
                f"branching abort {name} closes it"
            )
            return
        branch.abort()
        is_last = not space.branches()
    if is_last:
        close_mount(base)
