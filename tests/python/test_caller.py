"""In a container, what we write names the directory and the command as the caller outside does."""

from __future__ import annotations

import pytest
from conftest import Mounted
from support.command import branching

from branching.cli.app import app
from branching.cli.caller import COMMANDS, command_name, for_caller

OUTSIDE = {
    "BRANCHING_COMMAND_NAME": "branching-docker -w '/home/me/a b'",
    "BRANCHING_HOST_WORKSPACE": "/home/me/a b",
}


def test_every_command_is_known() -> None:
    assert COMMANDS.split("|") == [command.name for command in app.registered_commands]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRANCHING_BRANCH", raising=False)
    for name, value in OUTSIDE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("branching ls lists them", "branching-docker -w '/home/me/a b' ls lists them"),
        ("no branch is open in /workspace", "no branch is open in /home/me/a b"),
        ("cannot access /src/.branching: no", "cannot access /home/me/a b/.branching: no"),
        ("workspace: /workspace.", "workspace: /home/me/a b."),
        ("branching is a word", "branching is a word"),
        ("branching-docker run, x/branching run", "branching-docker run, x/branching run"),
        ("/home/src /srcs /src-x a/src /src.old /workspace/@b", None),
    ],
)
def test_a_text_has_the_callers_names(text: str, shown: str | None) -> None:
    assert for_caller(text) == (text if shown is None else shown)


@pytest.mark.usefixtures("outside")
def test_a_command_in_a_branch_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHING_BRANCH", "run-1")
    assert for_caller("branching ls in /workspace") == "branching ls in /workspace"
    assert command_name() == "branching"


def test_hints_and_usage_can_be_typed_outside(real: Mounted) -> None:
    """The user's own command prints what it prints."""
    done = branching(real.root, "abort", "none", **OUTSIDE)
    assert done.code == 125
    assert "Hint: branching-docker -w '/home/me/a b' ls lists them" in done.err
    done = branching(real.root, "commit", **OUTSIDE)
    assert done.err.startswith("Usage: branching-docker -w '/home/me/a b' commit ")
    done = branching(real.root, "run", "--", "echo", "branching ls /workspace", **OUTSIDE)
    assert done.out == "branching ls /workspace\n"
