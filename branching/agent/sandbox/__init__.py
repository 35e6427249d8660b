"""One sandbox for all that an agent does in a branch: commands, files, what it leaves running.

    agent ── BranchSandbox ══ two pipes ══ server ── commands, and what they start

The server is a process in the branch's sandbox that lives as long as the branch is worked in. So
a development server that one command starts is there for the next, /tmp is one /tmp, and one kill
ends everything; nothing of it is left when the files are merged. It runs commands and touches
files with the sandbox's rights and nothing more: whoever takes it over has gained nothing, and
what it answers is checked like any input.

A name loads its file when it is first used: the server loads this package too, and needs little.
"""

from __future__ import annotations

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.agent.sandbox.client import BranchSandbox, Completed, SandboxGone

__all__ = ["BranchSandbox", "Completed", "SandboxGone"]


__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, ".client"))
