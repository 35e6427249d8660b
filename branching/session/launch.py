"""Starts the interpreter of a session in a sandbox, with the mount helper beside it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from branching.errors import NamespaceError
from branching.fs import Branch
from branching.process import Owner, ResourceLimits, Sandbox, enforce
from branching.process.environment import environment_for
from branching.process.functions import function_pickle
from branching.process.sandbox.parent_state import ParentState
from branching.process.sandboxed_process import SandboxedProcess
from branching.session import other_python, worker
from branching.session.branch_mounts import BranchMounts
from branching.session.interpreter import Ends, Interpreter, OutputFunction

_CONTROL, _MOUNTER = 3, 4
"""Numbers of descriptors in the sandbox."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A sandbox with an interpreter, which was not heard of yet."""

    process: SandboxedProcess
    interpreter: Interpreter
    mounts: BranchMounts


def launch(
    stack: ExitStack,
    branch: Branch,
    *,
    python: str | None,
    limits: ResourceLimits | None,
    hide: Sequence[str],
    network: bool,
    environment: Mapping[str, str],
    clean_env: bool,
    sinks: Sequence[OutputFunction | None],
) -> Launched:
    """Starts an interpreter in a branch.

    Args:
        stack: What must be closed after the sandbox has ended.
        branch: The branch that it sees at the path of the workspace.
        python: Absolute path of the interpreter; None for a fork of the caller's own.
        limits: Resource limits of all that runs in the sandbox.
        hide: Globs of paths in the workspace that cannot be read.
        network: False leaves only the loopback interface.
        environment: Variables to add.
        clean_env: Start with an almost empty environment.
        sinks: Functions that are called with output, and with errors.

    Raises:
        NamespaceError: The workspace cannot be used.
        ProcessBranchError: The sandbox, or a limit, cannot be had on this machine.
    """
    found = branch.path.stat()
    owner = stack.enter_context(Owner.of(found.st_uid, found.st_gid))
    try:
        sandbox = Sandbox.of(
            branch.path,
            at=branch.seen_at,
            hide=hide,
            network=network,
            home=Owner.home_of(owner),
        )
    except OSError as error:
        raise NamespaceError(
            f"the workspace cannot be used: {error}; nothing ran", path=str(branch.path)
        ) from error
    if python is not None:
        sandbox = sandbox._replace(keep=(*sandbox.keep, *other_python.places(python)))
    scope = enforce.cgroup_for(limits)
    if scope is not None:
        stack.enter_context(scope)
    ends = Ends()
    interpreter = Interpreter(ends, "the interpreter of the session", sinks)
    requests, its_requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mounts = BranchMounts(
        requests, None if ParentState.read().is_privileged else sandbox.mount or sandbox.view
    )
    stack.callback(mounts.close)
    at = str(sandbox.at)
    if python is None:
        packed = function_pickle.pack(worker.serve, at, _CONTROL)
    else:
        packed = function_pickle.pack(other_python.execute, python, at, _CONTROL)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    control, output, errors = ends.its()
    try:
        process = SandboxedProcess(
            sandbox,
            environment=environment_for(sandbox.at, owner, added=environment, is_clean=clean_env),
            owner=owner,
            descriptors={
                0: nothing, 1: output, 2: errors, _CONTROL: control,
                _MOUNTER: its_requests.fileno(),
            },
            admit=None if scope is None else scope.add,
            wall_seconds=None if limits is None else limits.wall_time,
            call=packed.data,
            path=sys.path,
            mounter=_MOUNTER,
        )  # fmt: skip
    except BaseException:
        interpreter.close()
        raise
    finally:
        os.close(nothing)
        its_requests.close()
        ends.close_its()
    return Launched(process=process, interpreter=interpreter, mounts=mounts)
