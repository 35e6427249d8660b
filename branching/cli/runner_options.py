"""The options that run the candidates of a race on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from branching.cli.error_handling import UsageFault, refuse_in_container
from branching.cli.options import not_blank
from branching.errors import ClusterError

if TYPE_CHECKING:
    from branching.patterns.runner import Cluster


class Engine(str, Enum):
    """What runs attempts on the nodes of a cluster."""

    ray = "ray"
    dask = "dask"


@dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Where candidates run."""

    runner: Annotated[
        Engine | None,
        typer.Option(
            help="Run the candidates on a cluster of this kind. [default: on this machine]",
            show_default=False,
        ),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            callback=not_blank,
            help="With --runner: address of the cluster. [default: that of the engine's "
            "environment variable, or a cluster that is started on this machine]",
            show_default=False,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            callback=not_blank,
            help="With --runner: paths that are not sent to the cluster. Repeatable.",
            show_default=False,
        ),
    ] = None

    def cluster(self, *, keeps_branches: bool, has_group_limits: bool) -> Cluster | None:
        """Returns the cluster that candidates run on; None for this machine.

        Raises:
            UsageFault: Options contradict each other.
            ClusterError: The engine is not installed.
        """
        if self.runner is None:
            if self.address or self.exclude:
                raise UsageFault("--address and --exclude need --runner")
            return None
        refuse_in_container(
            "a container of branching-docker cannot reach a cluster: use branching on the host"
        )
        if keeps_branches:
            raise UsageFault(
                "--on-error keep and --keep-losers keep branches of this machine; those of a "
                "cluster are dropped there"
            )
        if has_group_limits:
            raise UsageFault(
                "limits of all candidates together cannot be enforced on several machines: use "
                "--memory-limit and --cpu-limit"
            )
        from branching.cluster import DaskRunner, RayRunner

        try:
            if self.runner is Engine.dask:
                return DaskRunner(self.address, exclude=self.exclude or ())
            return RayRunner(self.address, exclude=self.exclude or ())
        except ImportError as error:
            raise ClusterError(f"{error}; nothing was run") from error
