"""Commands that run at the same time in one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from branching import Workspace
from branching.cli.app import app
from branching.process.sandbox import launcher


def test_a_command_that_a_commit_kept_from_starting_is_started_in_a_new_branch(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit comes after the fork and before the sandbox."""
    start = launcher.start
    others: list[Path] = []

    def commit_first(*arguments: Any, **options: Any) -> object:
        if not others:
            with real_workspace.branch("other") as other:
                (other.path / "theirs").touch()
                others.append(other.path)
        return start(*arguments, **options)

    monkeypatch.setattr(launcher, "start", commit_first)
    root = real_workspace.root
    words = ["run", "-w", str(root), "--no-log", "--", "touch", "own"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert {"own", "theirs"} <= {path.name for path in root.iterdir()}
    assert real_workspace.branches() == []
