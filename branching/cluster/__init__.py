"""Attempts beyond one machine.

An attempt needs a base, on any machine, and answers with a layer: an archive of what it changed.
`base_cache` unpacks a base that came as an archive once per machine, and `remote_attempt` runs one
attempt in it. `branching attempt` is the command for both.

`RayRunner` and `DaskRunner` run the attempts of a pattern on a cluster:

    RayRunner ── ClusterRunner ── engine ══ node_attempt ── base_cache, remote_attempt
                 on this machine                on a node
"""

from branching._lazy import lazy_exports

# Type checkers know this name; it need not be imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from branching.cluster.dask_runner import DaskRunner
    from branching.cluster.ray_runner import RayRunner

__all__ = ["DaskRunner", "RayRunner"]

__getattr__ = lazy_exports(__name__, {"DaskRunner": ".dask_runner", "RayRunner": ".ray_runner"})
