"""`--hide`, `--no-network`, `--clean-env` and `--env` of the commands that run others."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching

CHECK = (
    "cat secret; echo $? >got; ls readable >>got; tail -n +3 /proc/net/dev | wc -l >>got;"
    " echo ${A_TOKEN-none} $PASSED >>got"
)
"""Writes to `got`: 1 if the secret cannot be read, the file that can be, the number of network
interfaces, and two variables."""
CALLS = {
    "run": ["--", "sh", "-c", CHECK],
    "shell": ["looks", "--", "sh", "-c", CHECK],
    "speculate": ["-c", CHECK],
    "best-of-n": ["-n", "1", "--", "sh", "-c", CHECK],
    "reflexion": ["--", "sh", "-c", CHECK],
    "cascaded": ["--fan-out", "1", "--", "sh", "-c", CHECK],
    "tournament": ["--judge", "echo a", "-c", CHECK, "-c", CHECK],
    "beam-search": ["--expand", "true", "-c", CHECK, "--max-depth", "1"],
    "tree-of-thoughts": ["--expand", "true", "-c", CHECK, "--max-depth", "1"],
}
OPTIONS = ["--hide", "secret", "--no-network", "--clean-env", "--env", "PASSED"]
VARIABLES = {"A_TOKEN": "token", "PASSED": "passed"}


@pytest.fixture
def base(real: Mounted) -> Path:
    (real.base / "secret").write_text("the secret\n")
    (real.base / "readable").write_text("")
    return real.base


def got(real: Mounted, command: str, *options: str) -> list[str]:
    """Returns the output of a program that reports what it can see."""
    if command == "shell":
        assert branching(real.root, "create", "looks").code == 0
    words = [*options, *CALLS[command]]
    done = branching(real.root, command, *words, **VARIABLES)
    assert done.code == 0, done
    if command == "shell":
        assert branching(real.root, "commit", "looks").code == 0
    return (real.base / "got").read_text().splitlines()


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("command", CALLS)
def test_the_isolation_options_restrict_what_a_command_sees(real: Mounted, command: str) -> None:
    assert got(real, command, *OPTIONS) == ["1", "readable", "1", "none passed"]


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("command", ["run", "best-of-n"])
def test_without_them_it_sees_all(real: Mounted, command: str) -> None:
    secret, readable, _, variables = got(real, command)
    assert (secret, readable, variables) == ("0", "readable", "token passed")


def test_a_setup_and_a_judge_see_no_more(real: Mounted, base: Path) -> None:
    look = 'echo "$A_TOKEN" >&2; ! cat secret'
    done = branching(
        real.root,
        *("best-of-n", "--setup", look, "--evaluate", f"{look} && echo 1"),
        *("-n", "1", *OPTIONS, "--", "true"),
        **VARIABLES,
    )
    assert done.code == 0, done
    assert "the secret" not in done.out + done.err
    assert "token" not in done.out + done.err
    assert (base / "secret").read_text() == "the secret\n"


@pytest.mark.usefixtures("base")
@pytest.mark.parametrize("command", ["run", "speculate"])
def test_a_variable_is_named_only_for_a_clean_environment(real: Mounted, command: str) -> None:
    done = branching(real.root, command, "--env", "PASSED", *CALLS[command])
    assert done.code == 2
    assert "--clean-env" in done.err


@pytest.mark.usefixtures("base")
def test_a_missing_variable_is_reported(real: Mounted) -> None:
    done = branching(real.root, "run", "--clean-env", "--env", "NO_SUCH", "--", "true")
    assert done.code == 0
    assert "--env NO_SUCH: there is no such variable" in done.err
