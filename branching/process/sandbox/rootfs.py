"""Has the file system view of a sandboxed function built. Runs in init.

`branchfs sandbox view` builds it in init's mount namespace, as `branchfs sandbox` does for
commands: `branchfs/crates/sandbox/src/rootfs.rs` describes the view. The branch of a memory session
is shown here instead, after the view, in a user namespace that init enters in between: all earlier
mounts are locked in it, and the mount of the branch can be replaced.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress

from branching._linux import syscalls
from branching.process.sandbox import mount_table
from branching.process.sandbox.config import Sandbox
from branching.process.sandbox.launch_request import Request, packed

_CAPABILITIES = 32
_READ_BYTES = 1 << 16


class ViewError(Exception):
    """The view could not be built."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message)
        self.message = message
        """What init says to the caller."""


def build(request: Request) -> list[str]:
    """Builds the view in this mount namespace. The branch of a session is missing in it.

    Returns:
        The writable directories.

    Raises:
        OSError: The program cannot be started.
        ViewError: A step of it has failed.
    """
    if os.geteuid() != 0:
        _keep_capabilities()
    blob = os.memfd_create("view", os.MFD_CLOEXEC)
    fields = {
        "sandbox": packed(request.sandbox._replace(caches=(), directory=None)),
        "owner": request.owner or request.user,
        "has_branch": not request.is_session,
    }
    os.write(blob, json.dumps(fields).encode())
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.posix_spawn(
        request.program,
        ["branchfs", "sandbox", "view", str(blob)],
        {},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, blob, blob),
            (os.POSIX_SPAWN_DUP2, writing, 1),
        ],
    )
    os.close(writing)
    os.close(blob)
    with open(reading, "rb", buffering=_READ_BYTES) as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    if not answer:  # another version of it, or it was killed
        raise OSError(errno.EPROTO, "it gave no answer", request.program)
    if not answer.startswith(b"["):
        raise ViewError(answer)
    return [os.fsdecode(place.encode("latin-1")) for place in json.loads(answer)]


def _keep_capabilities() -> None:
    """Makes the capabilities of this process those of the programs that it executes, too.

    Only root has that by itself. `privileges` takes them away again.
    """
    low = (1 << _CAPABILITIES) - 1
    syscalls.set_capabilities(permitted=low, effective=low, inheritable=low)
    for capability in range(_CAPABILITIES):
        syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, capability)


class SessionBranch:
    """Detached mounts of a session's branch and of its workspace, made before the view is built."""

    def __init__(self, sandbox: Sandbox) -> None:
        view = str(sandbox.view)
        self._at = str(sandbox.at)
        self._is_read_only = _is_mounted_read_only(view)
        self._branch = syscalls.clone_mount_at(view)
        self.workspace = -1
        """The workspace with all its branches; -1 if that has mounts of branches that are locked
        here."""
        with suppress(OSError):
            self.workspace = syscalls.clone_mount_at(str(sandbox.mount or view))

    def show(self) -> None:
        """Attaches the branch at the workspace's path, and closes both."""
        syscalls.attach_mount(self._branch, self._at)
        flags = os.statvfs(self._at).f_flag & syscalls.KEPT_FLAGS
        flags |= syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_NOSUID | syscalls.MS_NODEV
        flags |= syscalls.MS_RDONLY if self._is_read_only else 0
        syscalls.mount(None, self._at, None, flags)
        os.close(self._branch)
        if self.workspace >= 0:
            os.close(self.workspace)


def _is_mounted_read_only(path: str) -> bool:
    """Returns whether the mount around `path` is read-only, other than its file system alone."""
    if not os.statvfs(path).f_flag & os.ST_RDONLY:
        return False
    mount = mount_table.around(path)
    return mount is not None and mount.is_read_only
