"""A pytest plugin: runs the published package's own tests with this library on a live mount.

Its tests name modules of the published package and hand it a backend that only counts. Here these
names lead to this library, each test gets a real mount, and the operations on it are reported
to the test's counting backend. The tests themselves are those of the source distribution,
unchanged.
"""

from __future__ import annotations

import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.branchfs import mounted

import branching
from branching.fs.backend import Backend

_mount: Path | None = None


class Counted:
    """The library's backend, which reports its operations to the backend of the test."""

    def __init__(self, backend: Backend, counter: Any) -> None:
        self._backend = backend
        self._counter = counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create(self, name: str, parent: int, **options: Any) -> Any:
        made = self._backend.create(name, parent, **options)
        self._counter.create_branch(name, made.path, None, None)
        return made

    def commit(self, branch: Any, **options: Any) -> Any:
        done = self._backend.commit(branch, **options)
        self._counter.commit(branch.path)
        return done

    def abort(self, branch: Any) -> None:
        self._backend.abort(branch)
        self._counter.abort(branch.path)


class FSBackend:
    """Stands for the base class of the published backends."""


def detect_fs_for_mount(path: object) -> tuple[Any, Path]:
    """Replaced by the tests with one that returns their counting backend."""
    raise AssertionError(f"not replaced for {path}")


def open_workspace(path: object) -> branching.Workspace:
    """Opens this test's mount, whatever path it made up."""
    assert _mount is not None
    counter, _ = sys.modules["branching.core.workspace"].detect_fs_for_mount(path)
    workspace = branching.Workspace(_mount)
    workspace._backend = Counted(workspace._backend, counter)
    return workspace


def _module(name: str, **content: object) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)


def pytest_configure() -> None:
    """Puts the published package's modules in place."""
    import branching.patterns
    import branching.process

    os.environ["BRANCHFS_MOUNT"] = "/"  # or its tests are skipped; each gets its own below
    patterns = {name: getattr(branching, name) for name in branching.patterns.__all__}
    _module("branching.agent")
    for leaf in ("patterns", "speculate", "result"):
        _module(f"branching.agent.{leaf}", **patterns, run_in_process=None)
    _module("branching.core")
    _module("branching.core.base", FSBackend=FSBackend)
    _module(
        "branching.core.workspace",
        Workspace=open_workspace,
        detect_fs_for_mount=detect_fs_for_mount,
    )
    _module("branching.exceptions", **vars(branching.errors))
    _module("branching.process.runner", run_in_process=None)
    _module("branching.process._cgroup", create_group=None, kill_scope=None)


@pytest.fixture(autouse=True)
def _live_mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global _mount  # noqa: PLW0603  (the tests open it by a function of their module)
    with (
        tempfile.TemporaryDirectory(prefix="bt-published-") as place,
        mounted(Path(place, "base"), Path(place, "mount")) as point,
    ):
        _mount = point
        monkeypatch.setenv("BRANCHFS_MOUNT", os.fspath(point))
        yield
        _mount = None
