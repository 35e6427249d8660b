"""Creates a network namespace with only the loopback interface, which is up."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct

from branching._linux import syscalls

_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1


def enter() -> None:
    """Moves this process into a new network namespace.

    Without the capability to configure it (a container's root lacks NET_ADMIN), a helper process
    creates it in a user namespace, where it has all capabilities, and this process enters it.
    """
    syscalls.unshare(syscalls.CLONE_NEWNET)
    try:
        _raise_loopback()
        return
    except PermissionError:
        pass
    ours, helpers = socket.socketpair()
    with ours, helpers:
        helper = os.fork()
        if helper == 0:
            _make(helpers)
        helpers.close()
        answer, descriptors, _, _ = socket.recv_fds(ours, 64, 1)
        os.waitpid(helper, 0)
    if not descriptors:
        number = int(answer or errno.EPERM)
        raise OSError(number, os.strerror(number))
    syscalls.setns(descriptors[0], syscalls.CLONE_NEWNET)
    os.close(descriptors[0])


def _make(answer: socket.socket) -> None:
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNET)
        _raise_loopback()
        # An open descriptor keeps the namespace alive when its maker has ended.
        space = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        socket.send_fds(answer, [b"up"], [space])
    except OSError as error:
        answer.send(b"%d" % (error.errno or errno.EPERM))
    finally:
        os._exit(0)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        flags = fcntl.ioctl(handle, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        up = struct.unpack("16sH14x", flags)[1] | _IFF_UP
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", up))
