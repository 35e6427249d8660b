"""The options that limit what a branch may use, and how sizes and shares are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from branching.process import ResourceLimits


def parse_size(text: str) -> int:
    """Reads 512M, 1.5G. Zero is refused: nothing could run in it."""
    from branching.process import ResourceLimits, parse_memory_size

    try:
        size = parse_memory_size(text)
        if size <= 0:
            raise typer.BadParameter("a size must be more than zero")
        ResourceLimits(memory=size)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace("memory must", "a size must")) from None
    return size


def parse_cpu(text: str) -> float:
    """Reads 0.5, half of one CPU."""
    from branching.process import ResourceLimits

    try:
        share = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; write 0.5 or 2") from None
    try:
        ResourceLimits(cpu=share)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return share


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """What each branch may use."""

    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit of each branch's processes together: 512M, 1.5G. Above it the "
            "kernel kills processes.",
            show_default=False,
        ),
    ] = None
    memory_high: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory above which the kernel slows a branch down (cgroup v2).",
            show_default=False,
        ),
    ] = None
    oom_group: Annotated[
        bool,
        typer.Option(
            "--oom-group",
            help="When out of memory, kill all processes of the branch, not only the largest.",
        ),
    ] = False
    cpu_limit: Annotated[
        float | None,
        typer.Option(
            metavar="FRAC",
            parser=parse_cpu,
            help="CPU limit of each branch: 0.5 is half of one CPU.",
            show_default=False,
        ),
    ] = None
    pids_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=4_194_304,  # PIDS_MAX; its module is not loaded for a help
            help="Maximum number of processes and threads of each branch.",
            show_default=False,
        ),
    ] = None
    disk_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Disk space that each branch may add. Writes above it fail (EDQUOT).",
            show_default=False,
        ),
    ] = None

    def limits(self) -> ResourceLimits | None:
        """Returns the limits of each branch, if any were given."""
        from branching.process import ResourceLimits

        limits = ResourceLimits(
            memory=self.memory_limit,
            memory_high=self.memory_high,
            oom_group=self.oom_group,
            cpu=self.cpu_limit,
            pids=self.pids_limit,
            disk=self.disk_limit,
        )
        return None if limits == ResourceLimits() else limits


@dataclass(frozen=True, kw_only=True)
class GroupLimitOptions:
    """What all branches of a call may use together."""

    group_memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE",
            parser=parse_size,
            help="Memory limit of all branches together.",
            show_default=False,
        ),
    ] = None
    group_cpu_limit: Annotated[
        float | None,
        typer.Option(
            metavar="FRAC",
            parser=parse_cpu,
            help="CPU limit of all branches together.",
            show_default=False,
        ),
    ] = None

    def group_limits(self) -> ResourceLimits | None:
        """Returns the limits of all together, if any were given."""
        from branching.process import ResourceLimits

        limits = ResourceLimits(memory=self.group_memory_limit, cpu=self.group_cpu_limit)
        return None if limits == ResourceLimits() else limits
