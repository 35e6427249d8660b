"""All exceptions of the library.

    BranchingError                  the base class; catch it to catch all of them
    ├── MountError                  the workspace's mount cannot be used or cannot create a branch
    ├── BranchError                 an operation on one branch failed
    │   ├── BranchStaleError        a sibling was committed first; rebase or abort the branch
    │   ├── BranchNotFoundError     the branch does not exist, or no longer
    │   ├── CommitError             the commit did not happen; parent and branch are unchanged
    │   │   └── ConflictError       the commit would overwrite changes made elsewhere
    │   ├── AbortError              the branch could not be dropped; it still exists
    │   └── RecoveryError           a commit, undo or redo was applied but not completed
    ├── ProcessBranchError          a process in a branch failed or could not be run
    │   ├── ForkError               the process could not be created
    │   ├── NamespaceError          the sandbox could not be set up; nothing ran
    │   └── SetupError              the setup of a call failed; no candidate was tried
    ├── ClusterError                an attempt on another machine was not run, or its result is lost
    └── MemoryBranchError           a memory branch failed

Mistakes of the calling program (a wrong argument, a name with a slash) raise TypeError or
ValueError, which are not part of the tree. This module imports no other module of the package, so
that the use of an exception never loads a layer.
"""

from __future__ import annotations


class BranchingError(Exception):
    """Base class of all exceptions of the library.

    The workspace is unchanged unless a subclass says otherwise. `str()` returns the message and,
    on a separate line, the hint. The attributes give programs the facts that the message contains.

    Args:
        message: What failed, on which object, and the resulting state.
        hint: What to do next.
        branch: Name of the branch concerned.
        path: The file or directory concerned.
        paths: The workspace-relative paths concerned: those of a conflict, or files still open.
        limit: Name of the resource limit concerned.
    """

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        branch: str | None = None,
        path: str | None = None,
        paths: tuple[str, ...] = (),
        limit: str | None = None,
    ) -> None:
        super().__init__(message)
        self.hint = hint
        """What to do next, or None."""
        self.branch = branch
        """Name of the branch concerned, or None."""
        self.path = path
        """The file or directory concerned, or None."""
        self.paths = paths
        """The workspace-relative paths concerned: those of a conflict, or files still open."""
        self.limit = limit
        """Name of the resource limit concerned, or None."""

    @property
    def message(self) -> str:
        """The message without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message}\nHint: {self.hint}" if self.hint else self.message


class MountError(BranchingError):
    """The mount does not respond, cannot be mounted, or cannot create a branch.

    Nothing was changed.
    """


class BranchError(BranchingError):
    """An operation on a branch failed: it is not open, it is frozen, or its name is taken."""


class BranchStaleError(BranchError):
    """A sibling was committed first. The branch's files return ESTALE: rebase or abort it."""


class BranchNotFoundError(BranchError):
    """No open branch has this name or number."""


class CommitError(BranchError):
    """The commit did not happen. Parent and branch are unchanged."""


class ConflictError(CommitError):
    """The commit would overwrite changes made elsewhere, or a sibling was committed first.

    Parent and branch are unchanged. `paths` lists the conflicting files, if any.
    """


class AbortError(BranchError):
    """The branch could not be dropped. It still exists, and its parent is unchanged."""


class RecoveryError(BranchError):
    """A commit, undo or redo failed in its last phase, and recovery must run.

    Usually it was applied and only needs completion: do not repeat it. If its rollback failed too,
    the base directory may be partly old and partly new. The message says which case it is. No
    other commit is accepted until recovery has run, at the next change or at the next mount.
    """


class ProcessBranchError(BranchingError):
    """A process in a branch failed, or could not be run as requested."""


class ForkError(ProcessBranchError):
    """The process could not be created. Nothing ran."""


class NamespaceError(ProcessBranchError):
    """The sandbox could not be set up. Nothing ran; nothing is ever run without it instead."""


class SetupError(ProcessBranchError):
    """The setup of a call failed. No candidate was tried."""


class ClusterError(BranchingError):
    """An attempt on another machine was not run, or its result was lost with the machine.

    The workspace is unchanged. `node` names the machine, if it is known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        branch: str | None = None,
        node: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, branch=branch)
        self.node = node
        """Name of the node of the cluster, or None."""


class MemoryBranchError(BranchingError):
    """A session could not fork, pick or go on. The message says why, and what state holds."""


def add_note(error: BaseException | None, note: str) -> None:
    """Adds a note about a second failure to an exception that is being handled.

    `BaseException.add_note` came with Python 3.11. It sets this attribute, which Python 3.10 keeps
    but does not print.

    Args:
        error: The exception; None does nothing.
        note: Description of the second failure.
    """
    if error is not None:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
