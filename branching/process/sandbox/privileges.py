"""Gives up all privileges permanently. Runs in init, before any code of the user runs."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable
from functools import cache

from branching._linux import syscalls
from branching.process.sandbox import landlock
from branching.process.sandbox import seccomp as call_filter

_CAPABILITIES_MAX = 64


def give_up(
    owner: tuple[int, int] | None,
    writable: Iterable[str],
    outputs: Iterable[int],
    *,
    is_session: bool = False,
) -> None:
    """Becomes `owner`, if given, and makes any later change of the user impossible.

    `writable` and `outputs` are for Landlock: the only places and open files to write to. A session
    keeps CAP_SYS_ADMIN in its own user namespace, permitted but not effective: a child that it
    forks needs it to copy its mount table. It is inheritable for a session that executes another
    interpreter, until the session's own code runs (`worker`). Programs have no capabilities.
    """
    admin = 1 << syscalls.CAP_SYS_ADMIN
    if is_session:  # what is not in the bounding set cannot be made inheritable any more
        low = 0xFFFFFFFF
        syscalls.set_capabilities(permitted=low, effective=low, inheritable=admin)
    give_up_first()
    if is_session:
        _drop_bounding_set()  # the new user namespace has filled it again
        syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
        if owner is not None:
            os.setresgid(owner[1], owner[1], owner[1])
            os.setresuid(owner[0], owner[0], owner[0])
    elif owner is not None:
        os.setgroups([])
        os.setresgid(owner[1], owner[1], owner[1])
        os.setresuid(owner[0], owner[0], owner[0])
    if is_session:
        syscalls.set_capabilities(permitted=admin, effective=0, inheritable=admin)
    else:
        syscalls.drop_capabilities()
    # From here on no program gains anything by being started, setuid or not.
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    landlock.restrict(writable, outputs)
    syscalls.install_filter(call_filter.program(syscalls.MACHINE, is_session=is_session))
    # The change of the user has cleared it: this process ends with its parent.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def give_up_first() -> None:
    """Gives up what is neither needed to make a sandbox nor a matter of what is asked for. It is
    done once in a process: an init that waits for its request does it meanwhile.
    """
    try:
        syscalls.join_new_keyring()
    except OSError:
        pass  # a container's filter refuses all that has to do with keys, also to read them
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    _drop_bounding_set()


def _drop_bounding_set() -> None:
    for capability in range(_CAPABILITIES_MAX):
        try:
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return  # that was the last one this kernel has
            if error.errno == errno.EPERM:
                return  # not allowed to, and not needed: no_new_privs makes it ineffective
            raise
