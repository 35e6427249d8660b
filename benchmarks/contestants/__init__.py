"""Everybody who takes part, in the order of the report; native first."""

from __future__ import annotations

from ..field.contestant import Contestant
from .copies import Copy, Reflink, Worktree
from .native import Native
from .ours import Ours
from .overlays import FuseOverlay, KernelOverlay
from .published import Published


def everybody() -> list[Contestant]:
    return [
        Native(),
        Ours("overlay"),
        Ours("fuse"),
        KernelOverlay(),
        FuseOverlay(),
        Published(),
        Copy(),
        Reflink(),
        Worktree(),
    ]
