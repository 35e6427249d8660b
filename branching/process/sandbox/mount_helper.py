"""Shows branches to the processes of a memory session. Runs in a fork of init with its privileges.

A child that a session forks copies its mount table (`unshare`), and can change nothing in the copy.
The helper does: it enters the mount table of a process, and attaches or unmounts a branch at the
workspace's path. No process of the sandbox can trace it or send it requests. A request of the
caller is one message with descriptors, the answer is one JSON message:

    adopt N, pidfd            the mount that the process sees is number N from now on
    attach N, pidfd, mount    attaches a detached mount, which is number N from now on
    attach N PATH, pidfd      the same for the branch at a path below the workspace's mount: for a
                              caller that may not clone mounts
    detach N, pidfd           unmounts number N
    kill N                    kills all processes that see number N
    bury N                    the same, and waits for their end

    {"step": "", "errno": 0}    {"step": "…", "errno": 22}

It also hides the files of a branch that the sandbox hides. When one of the covers has gone
(`masked_files`), it says `{"uncovered": N}` and kills the processes that see the branch.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

from branching._exit_codes import EXIT_KILLED
from branching._linux import fd_passing, mountinfo, syscalls
from branching.process.sandbox import mount_table, rootfs
from branching.process.sandbox.config import Sandbox
from branching.process.sandbox.masked_files import Watch

KILL_SECONDS_MAX = 5.0
_POLL_SECONDS = 0.001
_MAP = b"map %d %d"
_INIT = 1
_WORKSPACE = "/tmp"
"""Where the helper, in a mount table of its own, has the workspace's mount."""

_Identity = tuple[str, str]
"""The file system of a mount and the directory of it that is mounted: the same in each copy of a
mount table."""


class MountHelper:
    """Init's side of it."""

    def __init__(self, requests: socket.socket, sandbox: Sandbox, workspace: int) -> None:
        """Forks the helper, which takes `requests` about mounts at the workspace's path.

        `workspace` is a detached mount of the workspace, or -1 if the caller can clone mounts.
        """
        self._stream, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            if os.fork() == 0:
                try:
                    _close_all_but({requests.fileno(), its.fileno(), workspace})
                    if workspace >= 0:
                        mount_table.take_own()
                        syscalls.attach_mount(workspace, _WORKSPACE)
                        os.close(workspace)
                    _serve_init(its)
                    _Server(requests, sandbox).run()
                finally:
                    os._exit(EXIT_KILLED)

    def map_init(self, uid: int, gid: int) -> None:
        """Maps one user and one group into the user namespace that init has entered."""
        self._stream.send(_MAP % (uid, gid))
        number = int(self._stream.recv(16) or errno.EPIPE)
        if number:
            raise OSError(number, os.strerror(number))

    def let_go(self) -> None:
        """Leaves the helper to its requests."""
        self._stream.close()


def _close_all_but(wanted: set[int]) -> None:
    """Closes what init has open, detached mounts among it, which would keep branches in use."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with suppress(OSError):
                os.close(int(name))


def _serve_init(stream: socket.socket) -> None:
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # init sends it to all, and ends us with itself
    with stream:
        while message := stream.recv(64):
            uid, gid = map(int, message.split()[1:])
            try:
                _map(uid, gid)
                stream.send(b"0")
            except OSError as error:
                stream.send(b"%d" % (error.errno or errno.EIO))


def _map(uid: int, gid: int) -> None:
    for file, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/{_INIT}/{file}", "w") as target:
            target.write(text)


class _Server:
    def __init__(self, requests: socket.socket, sandbox: Sandbox) -> None:
        self._requests = requests
        self._at = str(sandbox.at)
        self._globs = sandbox.hide
        self._own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts: dict[int, _Identity] = {}
        self._watches: dict[int, Watch] = {}
        self._step = ""

    def run(self) -> NoReturn:
        while True:
            self._await_request()
            message, descriptors = fd_passing.receive(self._requests)
            if not message:
                os._exit(0)  # the caller is gone
            number = 0
            try:
                self._handle(message.decode(), descriptors)
                self._step = ""
            except OSError as error:
                number = error.errno or errno.EIO
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._requests.send(json.dumps({"step": self._step, "errno": number}).encode())

    def _await_request(self) -> None:
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        for watch in self._watches.values():
            poll.register(watch, select.POLLPRI)
        while self._requests.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            for number, watch in list(self._watches.items()):
                if not watch.is_whole():
                    poll.unregister(watch)
                    self._forget_covers(number)
                    self._requests.send(json.dumps({"uncovered": number}).encode())
                    self._kill(self._mounts[number], waits=False)

    def _handle(self, request: str, descriptors: list[int]) -> None:
        verb, number, *path = request.split(" ", 2)
        if verb != "adopt":
            self._forget_covers(int(number))
        if verb in ("kill", "bury"):
            self._step = "killing the processes of a branch"
            self._kill(self._mounts[int(number)], waits=verb == "bury")
            return
        if path:
            self._step = "opening the branch"
            descriptors.append(_clone(f"{_WORKSPACE}/{path[0]}"))
        self._step = "entering the mount table of the process"
        syscalls.setns(descriptors[0], syscalls.CLONE_NEWNS)
        try:
            if verb == "attach":
                self._step = "attaching the branch"
                self._mounts[int(number)] = self._attach(descriptors[1])
                self._step = "hiding files of the workspace"
                rootfs.hide(self._at, self._globs)
                self._watch_covers(int(number))
            elif verb == "adopt":
                self._step = "looking at the branch"
                with _opened(self._at) as place:
                    self._mounts[int(number)] = place.identity()
                self._watch_covers(int(number))
            else:
                self._step = "unmounting the branch"
                self._detach(self._mounts[int(number)])
        finally:
            syscalls.setns(self._own, syscalls.CLONE_NEWNS)

    def _watch_covers(self, number: int) -> None:
        if self._globs:
            self._watches[number] = Watch(rootfs.is_cover)

    def _forget_covers(self, number: int) -> None:
        if watch := self._watches.pop(number, None):
            watch.close()

    def _attach(self, mount: int) -> _Identity:
        syscalls.restrict_mount(mount, syscalls.MS_NOSUID | syscalls.MS_NODEV)
        with _opened(self._at) as place:
            syscalls.attach_mount_at(mount, place.number)
        with _opened(self._at) as place:
            return place.identity()

    def _detach(self, identity: _Identity) -> None:
        """Unmounts a branch. The sandbox might have put a symbolic link to one of its covers in the
        place of a directory above: nothing but that branch is unmounted.
        """
        with _opened(self._at) as place:
            if place.identity() != identity:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self._at)
            syscalls.unmount_at(place.number)

    def _kill(self, identity: _Identity, *, waits: bool) -> None:
        """Kills all processes that see a branch.

        A process that was killed makes no others, although its end may take long: the kernel frees
        its memory first. So when no unknown ones are found, there will be none.
        """
        deadline = time.monotonic() + KILL_SECONDS_MAX
        known: set[int] = set()
        while found := {pid for pid in self._pids() if self._sees(pid, identity)}:
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            for pid in found - known:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if found <= known:
                if not waits:
                    return
                time.sleep(_POLL_SECONDS)
            known |= found

    def _pids(self) -> Iterator[int]:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in (_INIT, os.getpid()):
                yield int(name)

    def _sees(self, pid: int, identity: _Identity) -> bool:
        try:
            with open(f"/proc/{pid}/mountinfo", "rb") as table:
                seen = [mountinfo.parse(line) for line in table]
        except OSError:
            return False  # it is dead
        here = [(mount.device, mount.root) for mount in seen if mount.point == self._at]
        return bool(here) and here[-1] == identity


def _clone(path: str) -> int:
    directory = syscalls.openat2(None, path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return syscalls.clone_mount(directory)
    finally:
        os.close(directory)


class _opened:  # noqa: N801
    """The directory at the workspace's path, without following symbolic links."""

    def __init__(self, path: str) -> None:
        self.number = syscalls.openat2(None, path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> _opened:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.number)

    def identity(self) -> _Identity:
        """Returns the identity of the mount that it lies in."""
        with open(f"/proc/self/fdinfo/{self.number}", "rb") as facts:
            mount_id = next(line for line in facts if line.startswith(b"mnt_id:")).split()[1]
        with mountinfo.MOUNT_TABLE.open("rb") as table:
            mount = next(
                mountinfo.parse(line) for line in table if line.startswith(mount_id + b" ")
            )
        return mount.device, mount.root
