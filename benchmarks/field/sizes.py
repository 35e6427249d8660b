"""How big the work of one run is. Rows name their sizes, so that like is compared with like."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Size:
    """The numbers of files, bytes, branches and runs of a mode."""

    name: str
    runs: int
    """The most of each workload; two are made, whatever they take."""
    minutes: float
    """What all of it may take: a workload that has had its share begins no further run."""
    big_tree_files: int
    tree_files: int
    unpacked_files: int
    small_operations: int
    stream_bytes: int
    big_file_bytes: int
    commit_files: tuple[int, ...]
    commit_bytes: int
    branches: int
    depth: int
    jobs: bool
    """Builds and test suites of real projects, which must be fetched once."""


TINY = Size(
    name="tiny",
    runs=2,
    minutes=1,
    big_tree_files=40,
    tree_files=30,
    unpacked_files=20,
    small_operations=20,
    stream_bytes=MIB,
    big_file_bytes=MIB,
    commit_files=(1, 5),
    commit_bytes=MIB,
    branches=3,
    depth=3,
    jobs=False,
)
QUICK = Size(
    name="quick",
    runs=2,
    minutes=3,
    big_tree_files=10_000,
    tree_files=2_000,
    unpacked_files=2_000,
    small_operations=2_000,
    stream_bytes=128 * MIB,
    big_file_bytes=256 * MIB,
    commit_files=(1, 100, 1_000),
    commit_bytes=128 * MIB,
    branches=100,
    depth=20,
    jobs=False,
)
FULL = Size(
    name="full",
    runs=5,
    minutes=29,
    big_tree_files=50_000,
    tree_files=5_000,
    unpacked_files=10_000,
    small_operations=20_000,
    stream_bytes=1024 * MIB,
    big_file_bytes=1024 * MIB,
    commit_files=(1, 100, 10_000),
    commit_bytes=1024 * MIB,
    branches=1_000,
    depth=20,
    jobs=True,
)
SIZES = {size.name: size for size in (TINY, QUICK, FULL)}
