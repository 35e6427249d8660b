"""A branch in which a part of the winner is put on top of the parent's present state.

Needed where not the whole winner lands as it is. The winner is frozen meanwhile (a child is made
of it), so that nothing in it can be swapped for a link while it is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from branching.agent.copy_paths import TreeCopier
from branching.agent.merge.plan import Plan, Text
from branching.agent.types import FlushError
from branching.fs import Branch


def fill(stage: Branch, winner: Branch, plan: Plan) -> list[FlushError]:
    """Does what the plan says in `stage`; returns what could not be done, path by path."""
    errors: dict[str, FlushError] = {}
    frozen = winner.branch(f"{winner.name}.frozen", None, None).__enter__()
    try:
        copied = TreeCopier(frozen.path, stage.path)
        steps: list[tuple[str, Callable[[], None]]] = []
        # What is in a directory goes before the directory, and comes after it.
        steps += [(path, partial(copied.clear, path)) for path in reversed(plan.winners)]
        steps += [(path, partial(copied.make, path)) for path in plan.winners]
        steps += [
            (path, partial(_write, stage.path / path, text)) for path, text in plan.texts.items()
        ]
        for path, step in steps:
            try:
                step()
            except OSError as error:
                reason = error.strerror or str(error)
                errors[path] = FlushError(path=path, op="write", message=reason)
    finally:
        frozen.abort()
    return list(errors.values())


def _write(path: Path, text: Text) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A new file: one that may not be written to is replaced all the same.
    path.unlink(missing_ok=True)
    path.write_bytes(text.content)
    os.chown(path, text.uid, text.gid)
    path.chmod(text.mode)
