"""In a container, messages name the directory and the command as the caller outside knows them."""

from __future__ import annotations

import errno

import pytest
from conftest import Mounted
from support.command import branching
from support.tools import served

from branching import BranchError, MountError, Workspace
from branching._caller import COMMANDS, command_name, for_caller
from branching.cli.app import app
from branching.mcp.errors import error_words, words
from branching.mcp.models import user_commits
from branching.tui.formatting import failure
from branching.tui.watch.branch_text import facts_text

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


HOST = "branching-docker -w '/home/me/a b'"


@pytest.mark.usefixtures("outside")
def test_errors_for_a_model_have_the_callers_names() -> None:
    error = MountError("/workspace cannot be mounted", hint="branching doctor looks for the cause")
    assert words(error) == (
        f"/home/me/a b cannot be mounted\nNext: tell the user: {HOST} doctor looks for the cause"
    )
    refused = error_words(OSError(errno.EACCES, "Permission denied", "/src/file"))
    assert refused == (
        "/home/me/a b/file: Permission denied. Nothing was changed.\n"
        "Next: use another path, or ask the user for access"
    )


@pytest.mark.usefixtures("outside")
def test_a_model_gets_the_command_that_its_user_can_type(faked: Mounted) -> None:
    assert f"run `{HOST} commit b` or `{HOST} abort b`" in user_commits("b")
    with Workspace(faked.root) as workspace:
        server = served(workspace, propose=True)
        assert f"run `{HOST} diff NAME` and `{HOST} commit NAME`" in (server.instructions or "")


@pytest.mark.usefixtures("outside")
def test_terminal_applications_have_the_callers_names() -> None:
    assert facts_text(None).plain == f"No branch is open. Try: {HOST} run -- COMMAND"
    error = BranchError("no branch in /workspace", hint="branching ls lists them")
    assert failure(error) == f"no branch in /home/me/a b ({HOST} ls lists them)"
