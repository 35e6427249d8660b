"""Runs shell scripts in a sandbox and returns their output."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from branching.process import Command, Ended, Owner, Sandbox


@dataclass(frozen=True)
class Said:
    """What a script printed and how it ended."""

    ended: Ended
    out: str
    err: str

    @property
    def code(self) -> int:
        return self.ended.exit_code

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def text(self) -> str:
        return self.out + self.err


def run_in(
    view: Path, script: str, *, owner: tuple[int, int] | None = None, **options: Any
) -> Said:
    """Runs a shell script in the sandbox of a directory."""
    out: list[bytes] = []
    err: list[bytes] = []
    with nullcontext(None) if owner is None else Owner.of(*owner) as lent:
        sandbox = Sandbox.of(view, home=None if lent is None else lent.home, **options)
        command = Command(
            ["/bin/sh", "-c", script],
            cwd=view,
            environment={"PATH": os.environ["PATH"], "TMPDIR": "/tmp"},
            sandbox=sandbox,
            owner=lent,
            stdout=out.append,
            stderr=err.append,
        )
        ended = command.run()
    return Said(ended, b"".join(out).decode(), b"".join(err).decode())
