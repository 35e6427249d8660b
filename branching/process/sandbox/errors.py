"""Why a sandbox could not be made: what init or the server says of it, and what can be done."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from branching.errors import ForkError, NamespaceError, ProcessBranchError
from branching.process.sandbox.parent_state import ParentState

_USERNS_SWITCHES = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile with `userns,`",
    ),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
}
"""Below /proc/sys: which value forbids user namespaces, and how they are allowed."""


class ServerGone(Exception):
    """The fork server ended before it read the request."""


def named(words: dict[str, Any]) -> ProcessBranchError:
    """Returns a message about the missing feature, with a hint."""
    number, step = int(words["errno"]), str(words["failed"])
    text = str(words.get("text") or os.strerror(number))
    if words.get("call"):
        text = f"{words['call']}: {text}"
    path = words.get("path")
    if "call" in words and path:  # by `branchfs sandbox`: one character a byte
        path = os.fsdecode(str(path).encode("latin-1"))
    where = f" ({path})" if path else ""
    if step == "clone" and number in (errno.EAGAIN, errno.ENOMEM):
        return ForkError(f"no process could be made: {text}; nothing ran")
    return NamespaceError(
        f"the sandbox could not be made: {'making namespaces' if step == 'clone' else step}: "
        f"{text}{where}; nothing ran",
        hint=_hint(step, number),
        path=path,
    )


def _hint(step: str, number: int) -> str:
    without = 'or use no sandbox (isolation="none")'
    if number in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS):
        is_privileged = ParentState.read().is_privileged
        for switch, (bad, fix) in _USERNS_SWITCHES.items():
            try:
                if Path("/proc/sys", switch).read_text().strip() == bad and not is_privileged:
                    return f"user namespaces are switched off: {fix}; {without}"
            except OSError:
                continue
        if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
            return (
                "in a container: docker run --cap-add SYS_ADMIN --security-opt "
                f"apparmor:unconfined, as root; {without}"
            )
        return f"{step} needs user namespaces, or root with CAP_SYS_ADMIN; {without}"
    return f"fix the cause that the error names, {without}"
