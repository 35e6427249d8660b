"""What one attempt costs in a large tree: its own copy or branch, a command that writes a file, and
the removal.

    sudo scripts/bench --mode attempts

The ways take turns, and each round begins with another one. Nothing is committed. All run the same
command, `sh -c 'echo tried >tried'`:

cp -a                   in a copy
git worktree            in a worktree, which has the tracked files only
docker run, image       in a container of an image that holds the tree as it was when it was made
docker run, copy        in a container of a small image, with a copy of the tree as its volume
branching run           by the command line in a mounted workspace: an interpreter for each attempt
branching, library      by a process that stays, in a sandbox, as patterns run their candidates
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from branching import BranchContext, Workspace

from .contestants.copies import Copy, Worktree
from .contestants.ours import Ours, program
from .field.contestant import Cannot, Contestant, need, run
from .field.figures import Spread, ratios
from .field.report import readable
from .workloads import tree

FILES = 60_000
ROUNDS = 5
COMMAND = ("/bin/sh", "-c", "echo tried >tried")
REFERENCE = "cp -a"
"""The way over which ratios are taken."""

Attempt = Callable[[str], None]
"""Makes one attempt, of this name."""
Ways = dict[str, Attempt]


@contextmanager
def branches(driver: str, base: Path, scratch: Path) -> Iterator[Ways]:
    """Attempts in branches of a workspace of its own, mounted with one driver."""
    ours = Ours(driver)
    ours.check()
    own = scratch / "base"
    run("cp", "-a", base, own)
    words = (sys.executable, "-m", "branching", "run", "-q", "--on-success", "abort", "--")
    os.environ.setdefault("BRANCHFS", str(program()))
    # As installed: the modules are compiled once, not by each command.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        ours.begin(own, scratch)
        with Workspace(ours.root) as workspace:

            def in_sandbox(name: str) -> None:
                with workspace.branch(name, on_success=None) as branch:
                    with BranchContext(COMMAND, branch) as process:
                        process.wait()
                    branch.abort()

            yield {
                f"branching run, {driver}": lambda _: _discard(
                    run(*words, *COMMAND, cwd=ours.root)
                ),
                f"branching, library, {driver}": in_sandbox,
            }
    finally:
        ours.end()


@contextmanager
def copies(contestant: Contestant, base: Path, scratch: Path) -> Iterator[Ways]:
    """Attempts in copies or worktrees."""
    contestant.check()
    contestant.begin(base, scratch)

    def attempt(name: str) -> None:
        contestant.create(name)
        run(*COMMAND, cwd=contestant.path(name))
        contestant.abort(name)

    try:
        yield {contestant.name: attempt}
    finally:
        contestant.end()


@contextmanager
def containers(base: Path, scratch: Path) -> Iterator[Ways]:
    """Attempts in containers: the tree is in the image, or a copy of it is the volume."""
    need("docker", "docker.io")
    image = f"branching-bench-{os.getpid()}"
    root = scratch / "root"
    _put_shell(root)
    (root / "work").mkdir()
    copy = Copy()
    copy.begin(base, scratch)
    start = ("docker", "run", "--rm", "--network", "none", "--workdir", "/work")
    try:
        _import(f"{image}:small", root)
        (root / "work").rmdir()
        _import(f"{image}:tree", root, base)

        def with_copy(name: str) -> None:
            copy.create(name)
            run(*start, "--volume", f"{copy.path(name)}:/work", f"{image}:small", *COMMAND)
            copy.abort(name)

        yield {
            "docker run, image": lambda _: _discard(run(*start, f"{image}:tree", *COMMAND)),
            "docker run, copy": with_copy,
        }
    finally:
        for tag in ("small", "tree"):
            run("docker", "image", "rm", "--force", f"{image}:{tag}")


def _put_shell(root: Path) -> None:
    """Copies the shell and its libraries into the root directory of an image."""
    libraries = [word for word in run("ldd", "/bin/sh").split() if word.startswith("/")]
    for file in ("/bin/sh", *libraries):
        place = root / file.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place)


def _import(image: str, root: Path, tree: Path | None = None) -> None:
    """Makes an image of a root directory, and of a tree as its /work."""
    words: list[str | Path] = ["tar", "-c", "-f", root.with_suffix(".tar"), "-C", root, "."]
    if tree is not None:
        words += ["-C", tree.parent, f"--transform=s,^{tree.name},work,", tree.name]
    run(*words)
    run("docker", "import", root.with_suffix(".tar"), image)
    root.with_suffix(".tar").unlink()


def _discard(_output: str) -> None:
    """What a command prints is of no interest."""


def measure(place: Path, files: int, rounds: int, tell: Callable[[str], None]) -> str:
    """Measures all ways in turn.

    Args:
        place: An empty directory on the disk to measure.
        files: Number of files of the tree.
        rounds: How many attempts of each way are counted, after one that is not.
        tell: Takes a line of progress.

    Returns:
        The figures as a table.
    """
    base = place / "base"
    base.mkdir()
    tell(f"making {files} files")
    tree.make(base, files)
    run("git", "repack", "-q", "-a", "-d", cwd=base)  # loose objects would be as many files again
    groups: list[Callable[[Path, Path], AbstractContextManager[Ways]]] = [
        lambda base, scratch: copies(Copy(), base, scratch),
        lambda base, scratch: copies(Worktree(), base, scratch),
        containers,
        lambda base, scratch: branches("fuse", base, scratch),
        lambda base, scratch: branches("overlay", base, scratch),
    ]
    missing: list[str] = []
    with ExitStack() as stack:
        ways: Ways = {}
        for number, group in enumerate(groups):
            scratch = place / str(number)
            scratch.mkdir()
            try:
                ways |= stack.enter_context(group(base, scratch))
            except Cannot as reason:
                missing.append(str(reason))
        took: dict[str, list[float]] = {way: [] for way in ways}
        names = list(ways)
        for turn in range(rounds + 1):
            for way in names[turn % len(names) :] + names[: turn % len(names)]:
                tell(f"round {turn} of {rounds}: {way}")
                started = time.perf_counter()
                ways[way](f"attempt{turn}")
                if turn:  # in the first one, files and programs are read from the disk
                    took[way].append(time.perf_counter() - started)
    return table(took, missing)


def table(took: dict[str, list[float]], missing: list[str]) -> str:
    """Returns a table of the seconds that each way took, and the reasons of those that are not
    in it."""
    lines = [
        f"| an attempt | min | median | max | to {REFERENCE} (min to max) |",
        "|---|--:|--:|--:|--:|",
    ]
    for way, samples in took.items():
        spread = Spread.of(samples)
        times = [readable(each, "s") for each in (spread.minimum, spread.median, spread.maximum)]
        over = ratios(samples, took[REFERENCE])
        ratio = f"{over.median:.3f} ({over.minimum:.3f} to {over.maximum:.3f})"
        lines.append(f"| {' | '.join([way, *times, ratio])} |")
    return "\n".join([*lines, "", *(f"- missing: {reason}" for reason in missing)])
