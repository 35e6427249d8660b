"""`branching ls`: the open branches."""

from __future__ import annotations

import sys
import time

from branching.cli.failure import reported
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.place import opened_workspace
from branching.cli.report import print_json


def ls(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """List the open branches, the oldest first: name, state, age, place in the tree.

    Example: branching ls
    """
    from branching.fs.claims import left

    with reported(json=json):
        with opened_workspace(workspace) as space:
            records = space.branches()
            lost = left(space)
        if lost:
            names = ", ".join(record.name for record in lost)
            print(
                f"note: left by an MCP server that was killed: {names}. The next one drops what is "
                "neither committed nor aborted until then",
                file=sys.stderr,
            )
        if json:
            print_json(
                "ls",
                branches=[
                    {
                        "name": record.name,
                        "state": record.state,
                        "frozen": record.frozen,
                        "path": str(record.path),
                        "branch_path": record.branch_path,
                        "created": record.created,
                        "disk_limit": record.disk_limit,
                        "disk_used": record.disk_used,
                    }
                    for record in records
                ],
            )
            return
        width = max((len(record.name) for record in records), default=0)
        for record in records:
            age = max(0.0, time.time() - record.created)
            print(f"{record.name:<{width}}  {record.state:<5}  {age:>8.0f}s  {record.branch_path}")
