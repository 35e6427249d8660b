"""What our drivers are to reach, row by row, and where a figure falls short of it or behind a peer.

A goal is a multiple of native, or a time where native cannot do the work. It is compared with the
median. A row without a goal has none because nothing was promised of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OURS = ("ours, overlay", "ours, fuse")
PEERS = ("fuse-overlayfs", "branchfs 0.1.1")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The most that rows whose whole name fits a pattern may take, by driver, as in `OURS`."""

    rows: str
    most: tuple[float | None, float | None]
    in_seconds: bool = False
    """Not a multiple of native's time."""


GOALS = (
    Goal(rows="create.*", most=(600e-6, 150e-6), in_seconds=True),
    Goal(rows="drop.*", most=(1e-3, 1e-3), in_seconds=True),
    Goal(rows="walk, warm", most=(1.3, 1.2)),
    Goal(rows="walk, cold", most=(2.3, 4)),
    Goal(rows="git status, first.*", most=(1.2, 3)),
    Goal(rows="git status, second", most=(1.2, 3)),
    Goal(rows="(rg|grep), warm", most=(1.1, 2.5)),
    Goal(rows="open and read a file .*, warm", most=(1.8, 6)),
    Goal(rows="untar .*", most=(1.5, 1.6)),
    Goal(rows="rm -rf .*", most=(1.3, 3)),
    Goal(rows="(read|write) .*(in a stream|anywhere).*", most=(1.1, 1.15)),
    # The kernel's overlayfs copies a file whole, whatever is written to it.
    Goal(rows="one byte in .*", most=(None, 1e-3), in_seconds=True),
    Goal(rows="commit .* files .*", most=(3, 3)),
    Goal(rows="commit .* MiB .*", most=(10e-3, 10e-3), in_seconds=True),
    Goal(rows="cargo build of .*", most=(1.05, 1.15)),
    Goal(rows="pytest of .*", most=(1.05, 1.15)),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One driver's figure beside its goal."""

    row: str
    contestant: str
    found: float
    most: float
    in_seconds: bool

    @property
    def is_missed(self) -> bool:
        return self.found > self.most


def verdicts(document: dict[str, object]) -> Iterator[Verdict]:
    """Returns each figure of ours that has a goal."""
    for figure in _figures(document):
        for goal in GOALS:
            if figure["contestant"] not in OURS or not re.fullmatch(goal.rows, figure["row"]):
                continue
            most = goal.most[OURS.index(figure["contestant"])]
            found = figure["median"] if goal.in_seconds else figure.get("ratio", {}).get("median")
            if most is not None and found is not None:
                yield Verdict(
                    row=figure["row"],
                    contestant=figure["contestant"],
                    found=found,
                    most=most,
                    in_seconds=goal.in_seconds,
                )
            break


def listener(document: dict[str, object]) -> Iterator[tuple[str, str, str, float]]:
    """Returns row, driver, peer, and how many times the peer's median the driver's is."""
    medians = {
        (figure["row"], figure["contestant"]): figure["median"] for figure in _figures(document)
    }
    for (row, name), median in medians.items():
        for peer in PEERS:
            other = medians.get((row, peer))
            if name in OURS and other is not None and median > other:
                yield row, name, peer, median / other


def _figures(document: dict[str, object]) -> Iterator[dict[str, Any]]:
    workloads = document["workloads"]
    assert isinstance(workloads, list)
    for workload in workloads:
        for figure in workload["figures"]:
            if "median" in figure:
                yield figure
