"""`branching status`: which workspace this is, and which branches are open."""

from __future__ import annotations

from pathlib import Path

from branching._caller import for_caller, host_directory
from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption, WorkspaceOption
from branching.cli.output import print_json
from branching.cli.workspace import opened_workspace

_AS_ASKED = "fuse was asked for"
"""The daemon's reason where the user has chosen the driver."""


def status(workspace: WorkspaceOption = None, json: JsonOption = False) -> None:
    """Show the workspace and its open branches.

    Example: branching status
    """
    from branching.fs.automount import base_around
    from branching.fs.unmounted_store import is_interrupted
    from branching.fs.workspace import find_mount

    with handle_errors(json=json):
        place = workspace or Path.cwd()
        # A directory that is not mounted is mounted to be shown, and the mount recovers.
        was_interrupted = find_mount(place) is None and is_interrupted(
            place if workspace or not place.is_dir() else base_around(place)
        )
        with opened_workspace(workspace) as space:
            branches = space.branches()
        if json:
            print_json(
                "status",
                workspace=str(space.root),
                base=str(space.base),
                fstype=space.fstype,
                driver_reason=space.driver_reason,
                policy=space.policy,
                recovered=was_interrupted,
                branches=[branch.name for branch in branches],
                **({"host_workspace": outside} if (outside := host_directory()) else {}),
            )
            return
        print(for_caller(f"workspace: {space.seen_at}"))
        print(f"fstype: {space.fstype}")
        if space.fstype == "branchfs" and space.driver_reason not in ("", _AS_ASKED):
            print(f"driver: fuse, not overlay: {space.driver_reason}")
        if space.fstype == "daxfs":
            print("driver: DaxFS is experimental and lacks much (docs/daxfs.md)")
        if was_interrupted:
            print(
                "recovered: a commit was interrupted, which left old and new files in "
                f"{for_caller(str(space.base))}; this command has finished it or rolled it back"
            )
        if not branches:
            print("branches: (none)")
            return
        print(f"branches ({len(branches)}):")
        for branch in branches:
            print(f"  {branch.name}" + (" (stale)" if branch.state == "stale" else ""))
