"""One sandbox for all work of an agent in a branch: commands, files, background processes.

    agent ── BranchSandbox ══ two pipes ══ server ── commands, and what they start

The server is a process in the branch's sandbox that exists as long as the branch is used. So a
development server that one command starts is available to the next, all commands share /tmp, and
one kill ends all processes before the files are merged. The server has only the rights of the
sandbox: code that takes it over gains nothing, and its replies are validated like any input.

Names are imported on first use, because the server imports this package, too.
"""

from __future__ import annotations

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.agent.sandbox.client import BranchSandbox, Completed, SandboxGone

__all__ = ["BranchSandbox", "Completed", "SandboxGone"]


__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, ".client"))
