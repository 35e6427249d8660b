"""The standard descriptors 0, 1 and 2: always open, and never a file of the library's own.

A new file gets the lowest free descriptor. In a program that was started without its standard
input (`program <&-`), or has closed it, the next socket becomes descriptor 0, which every process
that the program starts then takes for its input. So before the library opens a file, it opens
/dev/null in place of each closed standard descriptor: its own files are always 3 or above.
"""

from __future__ import annotations

import os
import sys

NUMBERS = (0, 1, 2)
_STREAMS = ("stdin", "stdout", "stderr")


def open_closed() -> list[int]:
    """Opens /dev/null at each closed standard descriptor; returns their numbers."""
    opened = []
    while not all(map(is_open, NUMBERS)):
        number = os.open(os.devnull, os.O_RDWR)  # the lowest free one
        if number not in NUMBERS:
            os.close(number)  # another thread was faster
            break
        os.set_inheritable(number, True)  # as standard descriptors are
        opened.append(number)
    return opened


def is_open(number: int) -> bool:
    """Returns whether a descriptor is open."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def is_stream(number: int) -> bool:
    """Returns whether a standard descriptor belongs to a standard stream of this program.

    Where the interpreter was started without the stream, or has closed it, any file may have got
    its number. Python opens all files but these such that no other program inherits them.
    """
    name = _STREAMS[number]
    if not is_open(number) or not os.get_inheritable(number):
        return False
    return any(_number_of(getattr(sys, each)) == number for each in (name, f"__{name}__"))


def _number_of(stream: object) -> int | None:
    try:
        number = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return None  # None, closed, or a stream without a descriptor
    return number if isinstance(number, int) else None
