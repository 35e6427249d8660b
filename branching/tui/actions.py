"""What a person can do to a branch from outside: the keys of `branching watch` as functions.

Each raises BranchingError (or OSError) saying why nothing was done, and blocks: they are errands.
What runs in a branch is told through the door of its call; what is done to the branch itself, the
file system does.
"""

from __future__ import annotations

from pathlib import Path

from branching.errors import BranchError, BranchStaleError
from branching.fs import Change, Reversal, Workspace
from branching.fs.branch_leases import release
from branching.runlog.control_socket import answers, ask
from branching.runlog.patches import read_patch
from branching.tui.diff.patch_sources import PatchSides
from branching.tui.watch.workspace_monitor import Sight


class Deeds:
    """Those of one workspace."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._logs = None if space.store is None else space.store / "logs"

    def pause(self, sight: Sight) -> str:
        """Pauses what runs, or lets it go on."""
        is_paused = sight.state == "paused"
        ask(self._door(sight), "resume" if is_paused else "pause", sight.name)
        return f"{sight.name} goes on" if is_paused else f"{sight.name} is paused"

    def stop(self, sight: Sight) -> str:
        """Ends what runs; its call goes on without it."""
        ask(self._door(sight), "stop", sight.name)
        return f"{sight.name} is told to end"

    def tell(self, sight: Sight, text: str) -> str:
        """Adds a line to its steer file, or to an agent's conversation."""
        ask(self._door(sight), "tell", sight.name, text)
        return f"told {sight.name}; a program hears it if it reads BRANCHING_STEER"

    def check_steered(self, sight: Sight) -> None:
        """Raises what the keys for what runs would raise, as far as that is known here."""
        self._door(sight)

    def keep(self, sight: Sight) -> str:
        """Has the branch left open when its call ends."""
        if not sight.is_running:
            self._check_open(sight)
            if self._is_attended(sight):
                ask(self._door_of(sight), "keep", sight.name)
                return self._kept(sight)
            if sight.entry is None and not sight.is_dropped_next:
                return (
                    f"{sight.name} is open; if the program that made it runs still, it may end it"
                )
            if sight.is_dropped_next and sight.record is not None:
                release(self._space, sight.record)
            return f"{sight.name} is open, and stays so until you commit or abort it"
        if sight.record is None:
            raise BranchError(
                f"{sight.name} is a command in a branch that is there; keep that", branch=sight.name
            )
        ask(self._door(sight), "keep", sight.name)
        return self._kept(sight)

    def preview(self, sight: Sight) -> list[Change]:
        """Returns what a commit would change; raises what it would raise."""
        self._check_ended(sight)
        return self._space.reopen(sight.name).commit(dry_run=True)

    def commit(self, sight: Sight, *, force: bool = False, skip: bool = False) -> str:
        """Commits the branch into its parent. What runs in it is not waited for: stop it first."""
        self._check_ended(sight)
        branch = self._space.reopen(sight.name)
        changes = branch.commit(force=force, skip=skip)
        parent = branch.branch_path.rpartition("/")[0]
        rest = ""
        if branch.remaining:
            rest = f"; {branch.remaining} changed paths stay in the branch"
        return f"{sight.name} is committed to {parent}: {len(changes)} paths changed{rest}"

    def rebase(self, sight: Sight) -> str:
        """Moves a stale branch onto the present state of its parent.

        Raises:
            ConflictError: Both changed the same paths, which it names. Nothing was changed.
        """
        if sight.record is None:
            raise BranchError(f"branch {sight.name!r} is gone", branch=sight.name)
        self._space.reopen(sight.name).rebase()
        return f"{sight.name} is rebased"

    def abort(self, sight: Sight) -> str:
        """Ends what runs in the branch, if it can be reached, and drops it with all it holds."""
        if sight.is_running:
            ask(self._door(sight), "stop", sight.name)
        if sight.record is None:
            raise BranchError(f"branch {sight.name!r} is gone already", branch=sight.name)
        self._space.reopen(sight.name).abort()
        return f"{sight.name} is dropped"

    def undo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Takes the last commit to the workspace back."""
        return self._space.undo(force=force, dry_run=dry_run)

    def patch(self, sight: Sight) -> PatchSides:
        """Returns what a branch changed which is gone. Raises BranchError if no patch is kept."""
        patch = None if self._logs is None else read_patch(self._logs, sight.name)
        if patch is None:
            raise BranchError(f"branch {sight.name!r} is gone, and no patch is kept of it")
        return PatchSides(sight.name, patch)

    def changes(self, sight: Sight) -> list[Change]:
        """Lists what the branch changed."""
        self._check_open(sight)
        return self._space.reopen(sight.name).diff(count_lines=True)

    def _check_ended(self, sight: Sight) -> None:
        self._check_open(sight)
        if sight.is_running:
            raise BranchError(
                f"{sight.name} was not committed: it still runs; have it kept (k) and stop it (x), "
                "and commit it when it has ended",
                branch=sight.name,
            )

    def _check_open(self, sight: Sight) -> None:
        if sight.record is None:
            raise BranchError(f"branch {sight.name!r} is gone", branch=sight.name)
        if sight.state == "stale":
            raise BranchStaleError(
                f"branch {sight.name!r} is stale: another one was committed first",
                hint="r rebases it onto what was committed, a drops it",
                branch=sight.name,
            )

    def _kept(self, sight: Sight) -> str:
        stale = "" if self._space.policy != "first-winner" else "; stale if another is committed"
        return f"{sight.name} is kept when its call ends{stale}"

    def _is_attended(self, sight: Sight) -> bool:
        """Whether the call that it belongs to is under way, though nothing runs in it."""
        has_door = sight.entry is not None and bool(sight.entry.door) and self._logs is not None
        return has_door and answers(self._door_of(sight))

    def _door(self, sight: Sight) -> Path:
        door = self._door_of(sight)
        if not sight.is_running:
            raise BranchError(f"nothing runs in {sight.name}: {sight.state}", branch=sight.name)
        return door

    def _door_of(self, sight: Sight) -> Path:
        if sight.entry is None or not sight.entry.door or self._logs is None:
            raise BranchError(
                f"{sight.name} cannot be steered: the program that made it takes no requests",
                branch=sight.name,
            )
        return self._logs / sight.entry.door
