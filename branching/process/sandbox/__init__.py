"""The sandbox: a process that sees one branch as the workspace, and little else.

    caller ── branchfs sandbox ── init ── the command, and all that it starts
    caller ── server ── init ── the function, and all that it starts

Commands are started by the program `branchfs sandbox` (branchfs/crates/sandbox), which does all
of what follows in Rust. The modules here do it for functions, which run in forks of an
interpreter. `launcher` is the caller's side of both.

`fork_server` is a small process with one thread, started on demand, that forks for all threads
of the caller, mostly ahead (`prefork`): nothing is ever forked from a program that has threads.
`init_process` is the first process of the new namespaces: it builds the view (`rootfs`), gives
up all privileges (`privileges`), starts the program (`pre_exec`) and stays to tell how it ended.
When init ends, by itself, by our hand, or because the caller is gone, the kernel kills
everything in its process namespace: double forks, sessions of their own and stopped processes
included.

What runs in server, init and child is in the files that say so at their head; `launcher` is the
caller's side. Nothing here knows what a branch is: it is given a directory, and where to show it.
"""

from __future__ import annotations

from branching.process.sandbox.config import OWN_TMP, Isolation, Sandbox, validate_isolation

__all__ = ["OWN_TMP", "Isolation", "Sandbox", "validate_isolation"]
