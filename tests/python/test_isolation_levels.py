"""Options that keep a command from files, from the network, and from keys in the environment."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from branching import Speculate, Workspace
from branching.patterns.command_candidate import Program, shell


def succeeds(workspace: Workspace, script: str, **options: Any) -> bool:
    """Runs the script in a branch, which is dropped."""
    program = Program(shell(script), workspace=workspace.seen_at, owner=None, **options)
    outcome = Speculate([program], commit=False, timeout=60)(workspace)
    if outcome.branch is not None:
        outcome.branch.abort()
    return outcome.winner is not None


@pytest.mark.parametrize("hide", [[], ["**/.env"]])
def test_a_hidden_file_cannot_be_read(real_workspace: Workspace, hide: list[str]) -> None:
    (real_workspace.base / "sub").mkdir()
    (real_workspace.base / "sub" / ".env").write_text("KEY=1\n")
    assert succeeds(real_workspace, "grep -q KEY sub/.env", hide=hide) is not bool(hide)


@pytest.mark.parametrize("network", [True, False])
def test_without_the_network_no_packet_from_outside_arrives(
    real_workspace: Workspace, network: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = f"exec 3<>/dev/tcp/127.0.0.1/{port}"
        assert succeeds(real_workspace, f"bash -c '{script}'", network=network) is network


@pytest.mark.parametrize("clean_env", [True, False])
def test_a_clean_environment_has_no_keys(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, clean_env: bool
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    script = 'test -n "$PATH" && test "$BRANCHING" = 1 && test -z "$SOME_API_KEY"'
    assert succeeds(real_workspace, script, clean_env=clean_env) is clean_env


@pytest.mark.parametrize("walls", [{"hide": ["*.key"]}, {"network": False}])
def test_sandbox_options_without_a_sandbox_are_refused(walls: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sandbox"):
        Program(["true"], workspace=None, owner=None, isolation="none", **walls)  # type: ignore[arg-type]
