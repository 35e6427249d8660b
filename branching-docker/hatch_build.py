"""Puts the image's build context into the distributions: what the Dockerfile copies, and what finds its base.

In the repository it lies beside this directory, in a source distribution below it, under `context`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTEXT = (
    ".dockerignore",
    "Dockerfile",
    "LICENSE",
    "README.md",
    "branchfs/Cargo.lock",
    "branchfs/Cargo.toml",
    "branchfs/crates/core/Cargo.toml",
    "branchfs/crates/core/src",
    "branchfs/crates/fuse/Cargo.toml",
    "branchfs/crates/fuse/src",
    "branchfs/crates/sandbox/Cargo.toml",
    "branchfs/crates/sandbox/src",
    "branchfs/src",
    "branching",
    "docker",
    "pyproject.toml",
    "scripts/base-image",
    "skills",
)


class BuildContext(BuildHookInterface):  # type: ignore[misc, type-arg]
    """The hook that hatchling finds by its base class."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the files. An editable installation builds from the tree it stands in."""
        if version == "editable":
            return
        root = Path(self.root)
        source = root / "context" if (root / "context").is_dir() else root.parent
        inside = "context" if self.target_name == "sdist" else "branching_docker/context"
        for name in CONTEXT:
            found = source / name
            for path in sorted(found.rglob("*")) if found.is_dir() else [found]:
                if path.is_file() and path.suffix != ".pyc":
                    build_data["force_include"][str(path)] = f"{inside}/{path.relative_to(source).as_posix()}"
