"""Memory branching: a live Python interpreter that forks together with its files.

    caller (session, interpreter) ── control socket ── worker, in the sandbox
                                  ── requests ──────── mount helper, in the sandbox

`session` has the public classes. `interpreter` is the caller's side of one interpreter, `worker`
the interpreter's own. `parking` closes the files of the workspace before the interpreter changes
its branch, and opens them afterwards. `branch_mounts` asks the mount helper to show a branch.
"""

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.session.cell import Cell
    from branching.session.child import Child
    from branching.session.session import Session

__all__ = ["Cell", "Child", "Session"]

_HOME = {"Cell": ".cell", "Child": ".child", "Session": ".session"}
"""Which module of this package has the name."""

__getattr__ = lazy_exports(__name__, _HOME)
