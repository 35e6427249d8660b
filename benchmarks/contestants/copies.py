"""Branches that are copies: `cp -a`, a copy by reflink, and a git worktree.

Creating costs the whole tree; work in them afterwards is native's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..field.contestant import Cannot, Contestant, need, run


class Copy(Contestant):
    name = "cp -a"
    copies = True
    options: tuple[str, ...] = ("--reflink=never",)

    def create(self, name: str, parent: str | None = None) -> str:
        run("cp", "-a", *self.options, self.path(parent) if parent else self.base, self.path(name))
        return name

    def path(self, branch: str) -> Path:
        return self.scratch / branch

    def abort(self, branch: str) -> None:
        shutil.rmtree(self.path(branch))

    def commit(self, branch: str) -> None:
        raise Cannot("it has no commit: what a copy changed nobody recorded")


class Reflink(Copy):
    name = "cp --reflink"
    options = ("--reflink=always",)

    def begin(self, base: Path, scratch: Path) -> None:
        super().begin(base, scratch)
        probe = scratch / "probe"
        probe.write_text("x")
        try:
            run("cp", "--reflink=always", probe, scratch / "probe-copy")
        except Cannot:
            raise Cannot("this file system cannot reflink (XFS and btrfs can)") from None


class Worktree(Contestant):
    """A git worktree: of what is committed to git alone."""

    name = "git worktree"
    copies = True

    def check(self) -> None:
        need("git", "git")

    def begin(self, base: Path, scratch: Path) -> None:
        super().begin(base, scratch)
        if not (base / ".git").exists():
            raise Cannot("this base is no git repository")

    def end(self) -> None:
        run("git", "worktree", "prune", cwd=self.base)

    def create(self, name: str, parent: str | None = None) -> str:
        start = [f"b-{parent}"] if parent else []
        run(
            "git",
            "worktree",
            "add",
            "-q",
            "-b",
            f"b-{name}",
            self.path(name),
            *start,
            cwd=self.base,
        )
        return name

    def path(self, branch: str) -> Path:
        return self.scratch / branch

    def commit(self, branch: str) -> None:
        identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
        run("git", "add", "-A", cwd=self.path(branch))
        run("git", *identity, "commit", "-q", "-m", branch, cwd=self.path(branch))
        run("git", "merge", "-q", "--ff-only", f"b-{branch}", cwd=self.base)
        self.abort(branch)

    def abort(self, branch: str) -> None:
        run("git", "worktree", "remove", "--force", self.path(branch), cwd=self.base)
        run("git", "branch", "-q", "-D", f"b-{branch}", cwd=self.base)
