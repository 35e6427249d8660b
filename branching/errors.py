"""Every exception of the library, in one tree.

    BranchingError                  anything below; catch this one to catch all
    ├── MountError                  the workspace's mount cannot be used, or cannot make a branch
    ├── BranchError                 one branch cannot do what was asked
    │   ├── BranchStaleError        a sibling was committed first; the branch can only be aborted
    │   ├── BranchNotFoundError     there is no such branch (any more)
    │   ├── CommitError             the commit did not happen; parent and branch are as before
    │   │   └── ConflictError       … because it would overwrite what others did
    │   ├── AbortError              the branch could not be dropped; it is still there
    │   └── RecoveryError           a commit, undo or redo was applied but not completed
    ├── ProcessBranchError          a process in a branch failed or could not be run as asked
    │   ├── ForkError               the process could not be made
    │   ├── NamespaceError          the sandbox could not be set up; nothing ran
    │   └── SetupError              the setup of a call failed; no candidate was tried
    └── MemoryBranchError           a memory branch failed

Mistakes of the calling program (a wrong argument, a name with a slash) are TypeError and
ValueError, not part of the tree. This file imports nothing of ours, so that naming an exception
never loads a layer.
"""

from __future__ import annotations


class BranchingError(Exception):
    """The root of the tree. The workspace is unchanged unless a subclass says otherwise.

    `str()` gives the message and, on a line of its own, the hint; `message` and `hint` are the
    parts. The other attributes carry what the message tells in words, for programs.
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
        """The workspace-relative paths concerned: of a conflict, of files still open."""
        self.limit = limit
        """Name of the resource limit concerned, or None."""

    @property
    def message(self) -> str:
        """What happened and what holds now, without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message}\nHint: {self.hint}" if self.hint else self.message


class MountError(BranchingError):
    """The mount does not answer, cannot be mounted, or cannot make a branch. Nothing was done."""


class BranchError(BranchingError):
    """A branch cannot do what was asked: it is not open, frozen, or its name is taken."""


class BranchStaleError(BranchError):
    """A sibling was committed first. The branch's files answer ESTALE; only abort is left."""


class BranchNotFoundError(BranchError):
    """No branch of that name or number is open."""


class CommitError(BranchError):
    """The commit did not happen: parent and branch are as they were before it."""


class ConflictError(CommitError):
    """The commit would overwrite what others did, or a sibling won the race.

    Parent and branch are as they were. `paths` lists the conflicting files where there are any.
    """


class AbortError(BranchError):
    """The branch could not be dropped: it is still there, its parent untouched."""


class RecoveryError(BranchError):
    """A commit, undo or redo failed in its last part: recovery has to run.

    Usually it was applied and only needs completion: do not repeat it. Where even its rollback
    failed, the base directory may be partly old and partly new. The message says which. No other
    commit is accepted until recovery has run: at the next change, or at the next mount.
    """


class ProcessBranchError(BranchingError):
    """A process in a branch failed, or could not be run the way it was asked for."""


class ForkError(ProcessBranchError):
    """The process could not be made. Nothing ran."""


class NamespaceError(ProcessBranchError):
    """The sandbox could not be set up. Nothing ran; there is no fallback to running without."""


class SetupError(ProcessBranchError):
    """The setup that candidates were to start from failed. No candidate was tried."""


class MemoryBranchError(BranchingError):
    """A memory branch failed. Process memory cannot be branched yet."""


def add_note(error: BaseException | None, note: str) -> None:
    """Sends a second failure along with the exception under way, which must not be hidden by it.

    `add_note` came with Python 3.11; its effect is this attribute, which 3.10 carries unseen.
    """
    if error is not None:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
