"""Requests a scope from systemd: a delegated cgroup for this process.

On a desktop our cgroup belongs to systemd, and a user cannot move processes out of it. So this
process asks systemd to move it into a new transient scope with `Delegate=yes`. The user's service
manager creates the scope, or the system manager for root. Later child processes start in the scope.
It ends with its last process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from pathlib import Path

from branching.errors import ProcessBranchError
from branching.process.cgroup.cgroup_dir import NAME_PREFIX

BUS_SECONDS_MAX = 25.0
"""The timeout of D-Bus for a call."""
MOVE_SECONDS_MAX = 5.0

_POLL_SECONDS = 0.002


def is_running() -> bool:
    """Returns whether systemd manages this system (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir()


def enter_scope() -> None:
    """Moves this process into a new scope.

    Raises:
        ProcessBranchError: systemd did not answer or refused. The process was not moved.
    """
    name = f"{NAME_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.scope"
    busctl = shutil.which("busctl")
    if busctl is None:
        raise _refusal("the program busctl, which asks systemd, is missing")
    call = [
        busctl,
        "--system" if os.geteuid() == 0 else "--user",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        *(name, "fail"),
        *("4", "Description", "s", "Branches of a directory"),
        *("Delegate", "b", "true"),
        *("CollectMode", "s", "inactive-or-failed"),
        *("PIDs", "au", "1", str(os.getpid())),
        "0",
    ]
    try:
        asked = subprocess.run(
            call, check=False, capture_output=True, text=True, timeout=BUS_SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        raise _refusal("systemd does not answer") from None
    if asked.returncode != 0:
        raise _refusal(f"systemd refused a scope: {asked.stderr.strip()}")
    deadline = time.monotonic() + MOVE_SECONDS_MAX
    while name not in Path("/proc/self/cgroup").read_text():
        if time.monotonic() > deadline:
            raise _refusal(f"systemd did not move this process into {name}")
        time.sleep(_POLL_SECONDS)


def _refusal(why: str) -> ProcessBranchError:
    return ProcessBranchError(
        f"limits cannot be enforced: {why}; nothing was started",
        hint="log in through systemd (`loginctl enable-linger` for a user without a session; "
        "XDG_RUNTIME_DIR must be set), run as root, or leave the limits out",
    )
