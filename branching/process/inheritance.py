"""Which of this program's open files a function in a process of its own may use, by number.

Those that were marked as to be inherited, as for any program that is started; and the pipes that
the function itself names, in its closure or among the variables of its module that it uses, for it
could not use them otherwise. Never directories, which lead out of a sandbox, nor connections to
servers on this machine, which act outside of it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Iterator

_STANDARD = (0, 1, 2)


def passed_on(named: Iterable[object], ours: set[int]) -> list[int]:
    """Returns the numbers of the files to pass on. `ours` are pipes that are not to be."""
    wanted = set(_integers(named))
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        number = int(name)
        if number in _STANDARD:
            continue
        try:
            mode = os.fstat(number).st_mode
            if os.get_inheritable(number):
                is_wanted = not stat.S_ISDIR(mode) and not _leads_to_a_server(number, mode)
            else:
                is_wanted = number in wanted and stat.S_ISFIFO(mode) and number not in ours
        except OSError:
            continue  # closed meanwhile, by another thread or because it listed the directory
        if is_wanted:
            found.append(number)
    return found


def _leads_to_a_server(number: int, mode: int) -> bool:
    if not stat.S_ISSOCK(mode):
        return False
    with socket.socket(fileno=os.dup(number)) as copy:
        if copy.family != socket.AF_UNIX:
            return False
        if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return True
        try:
            return bool(copy.getpeername())
        except OSError:
            return False  # connected to nobody


def _integers(values: Iterable[object]) -> Iterator[int]:
    for value in values:
        if isinstance(value, int):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (item for item in value if isinstance(item, int))
