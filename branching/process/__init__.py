"""The process layer: programs that run in a branch and die whole. It knows no file system."""

from __future__ import annotations

from branching.process.budget import Budget, told
from branching.process.command import Command, Ended, Sink
from branching.process.limits import ResourceLimits, parse_memory_size
from branching.process.owner import Owner

__all__ = [
    "Budget",
    "Command",
    "Ended",
    "Owner",
    "ResourceLimits",
    "Sink",
    "parse_memory_size",
    "told",
]
