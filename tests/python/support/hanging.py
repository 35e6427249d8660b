"""A file system whose daemon reads what it is asked and never answers.

A process that reads it hangs in the kernel, even after SIGKILL, until the daemon ends. Mount it
only in a private mount namespace: other programs read every mount that they find.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from pathlib import Path

from branching._linux import syscalls

_REQUEST_BYTES_MAX = 1 << 20
_FUSE_INIT = 26


class HangingMount:
    """It hangs from its beginning to `let_go`."""

    def __init__(self, point: Path) -> None:
        self.is_asked = threading.Event()
        """Somebody hangs now."""
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        syscalls.mount(
            "hanging", str(point), "fuse", syscalls.MS_NOSUID | syscalls.MS_NODEV, options
        )
        self._begin()
        self._daemon = threading.Thread(target=self._hear)
        self._daemon.start()

    def let_go(self) -> None:
        """Ends the daemon: all who hang get an error, or die of what they were sent."""
        os.eventfd_write(self._end, 1)
        self._daemon.join()
        os.close(self._device)
        os.close(self._end)

    def _begin(self) -> None:
        """Answers the one request that the kernel makes by itself."""
        request = os.read(self._device, _REQUEST_BYTES_MAX)
        _, opcode, unique = struct.unpack_from("=IIQ", request)
        assert opcode == _FUSE_INIT
        answer = struct.pack("=IIIIHHII32x", 7, 31, 0, 0, 0, 0, 4096, 1)
        os.write(self._device, struct.pack("=IiQ", 16 + len(answer), 0, unique) + answer)

    def _hear(self) -> None:
        while self._end not in select.select([self._device, self._end], [], [])[0]:
            os.read(self._device, _REQUEST_BYTES_MAX)
            self.is_asked.set()
