"""Scenarios of the published package BranchContext on a mount, one function each.

Run by the interpreter of an environment that has that package and not this one:
    python scenarios.py NAME MOUNTPOINT [PROGRAM]
Exits with 0 if all checks hold. The scenarios keep to what versions 0.2.0 and 0.3.0 have in common.
"""

# mypy: ignore-errors
# It runs with another package of that name than the checker sees.
from __future__ import annotations

import os
import sys
from pathlib import Path

from branching import (
    BeamSearch,
    BestOfN,
    BranchContext,
    Cascaded,
    ConflictError,
    Reflexion,
    Speculate,
    Tournament,
    TreeOfThoughts,
    Workspace,
)


def commit_and_abort(ws: Workspace) -> None:
    with ws.branch("made") as branch:
        (branch.path / "new").write_text("new")
        (branch.path / "seed.txt").unlink()
        assert not (ws.path / "new").exists()
    assert (ws.path / "new").read_text() == "new"
    assert not (ws.path / "seed.txt").exists()
    try:
        with ws.branch("dropped") as branch:
            (branch.path / "dropped").write_text("")
            raise KeyError("on purpose")
    except KeyError:
        pass
    assert not branch.path.exists()
    assert not (ws.path / "dropped").exists()


def nested(ws: Workspace) -> None:
    with ws.branch("outer") as outer:
        (outer.path / "outer").write_text("")
        with outer.branch("inner") as inner:
            (inner.path / "inner").write_text("")
            assert not (outer.path / "inner").exists()
        assert (outer.path / "inner").exists()
        assert not (ws.path / "inner").exists()
    assert (ws.path / "inner").exists()
    assert (ws.path / "outer").exists()


def conflict(ws: Workspace) -> None:
    first, second = ws.branch("first"), ws.branch("second")
    for branch in (first, second):
        branch.__enter__()
        (branch.path / "seed.txt").write_text(branch.name)
    first.commit()
    try:
        second.commit()
    except ConflictError:
        second.abort()
    else:
        raise AssertionError("the second commit went through")
    assert (ws.path / "seed.txt").read_text() == "first"


def kept(ws: Workspace) -> None:
    with ws.branch("kept", on_success=None) as branch:
        (branch.path / "new").write_text("")
    assert branch.path.exists()
    branch.commit()
    assert (ws.path / "new").exists()


def speculate(ws: Workspace) -> None:
    def candidate(index: int):
        def run(path: Path) -> bool:
            (path / f"by-{index}").write_text("")
            return index == 2

        return run

    outcome = Speculate([candidate(index) for index in range(4)], timeout=60)(ws)
    assert outcome.committed
    assert outcome.winner.branch_index == 2
    assert (ws.path / "by-2").exists()
    assert not (ws.path / "by-1").exists()
    outcome = Speculate([candidate(0), candidate(1)], first_wins=False, timeout=60)(ws)
    assert not outcome.committed


def best_of_n(ws: Workspace) -> None:
    def candidate(score: float):
        def run(path: Path) -> tuple[bool, float]:
            (path / "score").write_text(str(score))
            return True, score

        return run

    outcome = BestOfN([candidate(0.2), candidate(0.9), candidate(0.5)], timeout=60)(ws)
    assert outcome.committed
    assert outcome.winner.score == 0.9
    assert (ws.path / "score").read_text() == "0.9"


def reflexion(ws: Workspace) -> None:
    def task(path: Path, attempt: int, feedback: str | None) -> bool:
        (path / "attempts").write_text(str(attempt))
        assert (attempt == 0) == (feedback is None)
        return attempt == 2

    outcome = Reflexion(task, 3, critique=lambda path: (path / "attempts").read_text())(ws)
    assert outcome.committed
    assert (ws.path / "attempts").read_text() == "2"


def _scored(score: float):
    def run(path: Path) -> tuple[bool, float]:
        with (path / "way").open("a") as way:
            way.write(f"{score} ")
        return True, score

    return run


def tree_of_thoughts(ws: Workspace) -> None:
    outcome = TreeOfThoughts(
        [_scored(0.1), _scored(0.7)],
        expand=lambda path, depth: [_scored(0.3), _scored(0.8)],
        max_depth=3,
        timeout=60,
    )(ws)
    assert outcome.committed
    assert (ws.path / "way").read_text().split() == ["0.7", "0.8", "0.8"]


def beam_search(ws: Workspace) -> None:
    outcome = BeamSearch(
        [_scored(0.1), _scored(0.7), _scored(0.6)],
        expand=lambda path, depth: [_scored(0.3), _scored(0.8)],
        beam_width=2,
        max_depth=2,
        timeout=60,
    )(ws)
    assert outcome.committed
    assert (ws.path / "way").read_text().split()[-1] == "0.8"


def tournament(ws: Workspace) -> None:
    def candidate(size: int):
        def run(path: Path) -> bool:
            (path / "out").write_text("x" * size)
            return True

        return run

    def judge(left: Path, right: Path) -> int:
        return int((right / "out").stat().st_size > (left / "out").stat().st_size)

    outcome = Tournament([candidate(size) for size in (1, 5, 3)], judge=judge, timeout=60)(ws)
    assert outcome.committed
    assert (ws.path / "out").read_text() == "xxxxx"


def cascaded(ws: Workspace) -> None:
    def task(path: Path, feedback: list[str]) -> tuple[bool, str]:
        (path / "known").write_text(str(len(feedback)))
        return len(feedback) >= 3, "not yet"

    outcome = Cascaded(task, fan_out=(1, 2, 4), timeout=60)(ws)
    assert outcome.committed
    assert (ws.path / "known").read_text() == "3"


def process(ws: Workspace) -> None:
    """Its sandbox: an unprivileged user namespace with the branch bound to another place."""

    def work(path: Path) -> None:
        (path / "made").write_text(str(os.getuid()))

    with ws.branch("process") as branch, BranchContext(work, branch.path) as child:
        child.wait(timeout=60)
    assert (ws.path / "made").read_text() == "0"


def its_own_mount(base: Path, program: str) -> None:
    """Version 0.3.0 alone: it mounts and unmounts by the program's published words."""
    (base / "seed.txt").write_text("seed\n")
    with Workspace.mount(base, branchfs_bin=program) as ws:
        with ws.branch("made") as branch:
            (branch.path / "new").write_text("new")
        mountpoint = ws.path
        assert os.path.ismount(mountpoint)
    assert (base / "new").read_text() == "new"
    assert not mountpoint.exists()


def main() -> None:
    name, place = sys.argv[1], Path(sys.argv[2])
    if name == "its_own_mount":
        its_own_mount(place, sys.argv[3])
    else:
        globals()[name](Workspace(place))


if __name__ == "__main__":
    main()
