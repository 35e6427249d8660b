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
from branching.runlog.control_socket import is_alive, send_request
from branching.runlog.patches import patch_of, read_patch
from branching.tui.diff.patch_sources import PatchSource
from branching.tui.watch.workspace_monitor import BranchView


class BranchActions:
    """Those of one workspace."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._logs = None if space.store is None else space.store / "logs"

    def pause(self, view: BranchView) -> str:
        """Pauses what runs, or lets it go on."""
        is_paused = view.state == "paused"
        send_request(self._control_server(view), "resume" if is_paused else "pause", view.name)
        return f"{view.name} is resumed" if is_paused else f"{view.name} is paused"

    def stop(self, view: BranchView) -> str:
        """Stops the candidate; its call continues without it."""
        send_request(self._control_server(view), "stop", view.name)
        return f"{view.name} is being stopped"

    def tell(self, view: BranchView, text: str) -> str:
        """Adds a line to its steer file, or to an agent's conversation."""
        send_request(self._control_server(view), "tell", view.name, text)
        return f"sent to {view.name}; the program receives it if it reads BRANCHING_STEER"

    def check_steered(self, view: BranchView) -> None:
        """Raises what the keys for what runs would raise, as far as that is known here."""
        self._control_server(view)

    def keep(self, view: BranchView) -> str:
        """Has the branch left open when its call ends."""
        if not view.is_running:
            self._check_open(view)
            if self._is_attended(view):
                send_request(self._control_socket(view), "keep", view.name)
                return self._kept(view)
            if view.entry is None and not view.is_dropped_next:
                return f"{view.name} is open; the program that created it may still end it"
            if view.is_dropped_next and view.record is not None:
                release(self._space, view.record)
            return f"{view.name} is open, and stays so until you commit or abort it"
        if view.record is None:
            raise BranchError(
                f"{view.name} runs inside an existing branch; keep that branch instead",
                branch=view.name,
            )
        send_request(self._control_server(view), "keep", view.name)
        return self._kept(view)

    def preview(self, view: BranchView) -> list[Change]:
        """Returns what a commit would change; raises what it would raise."""
        self._check_ended(view)
        return self._space.reopen(view.name).commit(dry_run=True)

    def commit(self, view: BranchView, *, force: bool = False, skip: bool = False) -> str:
        """Commits the branch into its parent. What runs in it is not waited for: stop it first."""
        self._check_ended(view)
        branch = self._space.reopen(view.name)
        changes = branch.commit(force=force, skip=skip)
        parent = branch.branch_path.rpartition("/")[0]
        rest = ""
        if branch.remaining:
            rest = f"; {branch.remaining} changed paths stay in the branch"
        return f"{view.name} is committed to {parent}: {len(changes)} paths changed{rest}"

    def rebase(self, view: BranchView) -> str:
        """Moves a stale branch onto the present state of its parent.

        Raises:
            ConflictError: Both changed the same paths, which it names. Nothing was changed.
        """
        if view.record is None:
            raise BranchError(f"branch {view.name!r} is gone", branch=view.name)
        self._space.reopen(view.name).rebase()
        return f"{view.name} is rebased"

    def abort(self, view: BranchView) -> str:
        """Stops the command in the branch, if it can be reached, and drops the branch."""
        if view.is_running:
            send_request(self._control_server(view), "stop", view.name)
        if view.record is None:
            raise BranchError(f"branch {view.name!r} is gone already", branch=view.name)
        self._space.reopen(view.name).abort()
        return f"{view.name} is dropped"

    def undo(self, *, force: bool = False, dry_run: bool = False) -> Reversal:
        """Takes the last commit to the workspace back."""
        return self._space.undo(force=force, dry_run=dry_run)

    def patch(self, view: BranchView) -> PatchSource:
        """Returns what a branch changed which is gone or stale.

        Raises BranchError if the branch is gone and no patch of it is kept.
        """
        if view.state == "stale":
            return PatchSource(view.name, patch_of(self._space.reopen(view.name)))
        patch = None if self._logs is None else read_patch(self._logs, view.name)
        if patch is None:
            raise BranchError(f"branch {view.name!r} is gone, and no patch is kept of it")
        return PatchSource(view.name, patch)

    def changes(self, view: BranchView) -> list[Change]:
        """Lists what the branch changed, or what its kept patch changes."""
        if view.is_shown_by_patch:
            return self.patch(view).changes()
        self._check_open(view)
        return self._space.reopen(view.name).diff(count_lines=True)

    def _check_ended(self, view: BranchView) -> None:
        self._check_open(view)
        if view.is_running:
            raise BranchError(
                f"{view.name} was not committed: it still runs; keep it (k), stop it (x), and "
                "commit it when it has ended",
                branch=view.name,
            )

    def _check_open(self, view: BranchView) -> None:
        if view.record is None:
            raise BranchError(f"branch {view.name!r} is gone", branch=view.name)
        if view.state == "stale":
            raise BranchStaleError(
                f"branch {view.name!r} is stale: another one was committed first",
                hint="r rebases it onto what was committed, a drops it",
                branch=view.name,
            )

    def _kept(self, view: BranchView) -> str:
        stale = "" if self._space.policy != "first-winner" else "; stale if another is committed"
        return f"{view.name} is kept when its call ends{stale}"

    def _is_attended(self, view: BranchView) -> bool:
        """Whether the call that it belongs to is under way, though nothing runs in it."""
        has_control_socket = (
            view.entry is not None and bool(view.entry.door) and self._logs is not None
        )
        return has_control_socket and is_alive(self._control_socket(view))

    def _control_server(self, view: BranchView) -> Path:
        control_server = self._control_socket(view)
        if not view.is_running:
            raise BranchError(f"nothing runs in {view.name}: {view.state}", branch=view.name)
        return control_server

    def _control_socket(self, view: BranchView) -> Path:
        if view.entry is None or not view.entry.door or self._logs is None:
            raise BranchError(
                (
                    f"{view.name} cannot be controlled: the program that created it accepts no "
                    "requests"
                ),
                branch=view.name,
            )
        return self._logs / view.entry.door
