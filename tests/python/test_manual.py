"""The pages of commands are what --help says, and say what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import OnTerminal, branching, branching_argv

from branching.cli.app import app

REPOSITORY = Path(__file__).parents[2]


def test_the_manual_matches_help() -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "manual.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


STILTED = re.compile(
    r"\b(anew|at once|goes (on|with)|is no(ne)?|meanwhile|mend|nobody|ours|so too|somebody"
    r"|told|what becomes|whoever)\b",
    re.IGNORECASE,
)
PAGES = [
    *sorted((REPOSITORY / "docs").glob("commands*.md")),
    REPOSITORY / "docs" / "branching-docker.md",
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_manual_is_plain_english(page: Path) -> None:
    assert [found[0] for found in STILTED.finditer(page.read_text())] == []


def commands() -> list[str]:
    return [command.name for command in app.registered_commands if command.name]


def section_of(name: str) -> str:
    """Returns what the reference says of a command, from the page that the overview links."""
    overview = (REPOSITORY / "docs" / "commands.md").read_text()
    page: str
    anchor: str
    [(page, anchor)] = re.findall(rf"\[`{name}`\]\((commands-.*?\.md)#(.*?)\)", overview)
    text = (REPOSITORY / "docs" / page).read_text()
    section = text.split(f"\n## {anchor}\n", 1)[1]
    return section.split("\n## ", 1)[0]


@pytest.mark.parametrize("name", commands())
def test_every_command_has_help_with_an_example(name: str) -> None:
    section = section_of(name)
    assert "Example: branching" in section
    assert f"branching {name}" in section.split("Example: ", 1)[1].splitlines()[0]


@pytest.mark.contract("6.2")
@pytest.mark.parametrize("name", sorted(set(commands()) - {"attempt", "doctor", "completion"}))
def test_every_command_takes_a_workspace(name: str) -> None:
    assert "-w, --workspace PATH" in section_of(name)


@pytest.mark.contract("6.3")
@pytest.mark.parametrize(
    "name",
    sorted(
        set(commands())
        - {"shell", "session", "kernel", "hook", "mcp", "skill", "watch", "chat", "completion"}
    ),
)
def test_every_command_that_has_no_other_output_has_a_document(name: str) -> None:
    assert "--json" in section_of(name)


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("bash", "complete -o default -F"),
        ("zsh", "#compdef branching"),
        ("fish", "complete --comm"),
    ],
)
def test_completion_is_there_for_the_common_shells(shell: str, says: str) -> None:
    done = branching(REPOSITORY, "completion", shell)
    assert (done.code, says in done.out) == (0, True), done.err


COMPLETED = {
    "branching bes": "best-of-n",
    "branching run --on-s": "--on-success",
    "branching run --on-success k": "keep",
}
"""What is typed, and what the tab key makes of the last word."""


@pytest.fixture
def named_branching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the program `branching`, found by that name."""
    program = tmp_path / "branching"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(branching_argv())} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def complete_all(shell: OnTerminal) -> None:
    """Types the beginnings and the tab key, sees the rest, and leaves."""
    for typed, completed in COMPLETED.items():
        shell.seen = ""
        shell.type(f"{typed}\t")
        shell.wait_for(completed)
        shell.type("\x15")  # Ctrl-U: an empty line again
    shell.type("exit 5\n")
    assert shell.done().code == 5


def test_the_tab_key_completes_in_bash(named_branching: Path) -> None:
    bash = OnTerminal(
        named_branching, [], program=["bash", "--norc", "--noprofile", "-i"], PS1="in> "
    )
    bash.wait_for("in> ")
    bash.type('eval "$(branching completion bash)"; echo do""ne\n')
    bash.wait_for("done\n")
    complete_all(bash)


def test_the_tab_key_completes_in_zsh(named_branching: Path) -> None:
    """As `branching completion --help` says, a file among zsh's functions; at the first key."""
    functions = named_branching / "functions"
    functions.mkdir()
    (functions / "_branching").write_text(branching(REPOSITORY, "completion", "zsh").out)
    zsh = OnTerminal(named_branching, [], program=["zsh", "-f", "-i"], PS1="in> ", PROMPT="in> ")
    zsh.wait_for("in> ")
    zsh.type("unsetopt zle_bracketed_paste; zstyle ':completion:*' list-prompt ''\n")
    zsh.type('fpath=($PWD/functions $fpath); autoload -U compinit; compinit -u -D; echo do""ne\n')
    zsh.wait_for("done\n")
    complete_all(zsh)


@pytest.mark.parametrize(("typed", "completed"), COMPLETED.items(), ids=COMPLETED)
def test_the_tab_key_completes_in_fish(named_branching: Path, typed: str, completed: str) -> None:
    """As `branching completion --help` says: a file among fish's completions. `complete -C` prints
    what its tab key would offer."""
    place = named_branching / "config" / "fish" / "completions"
    place.mkdir(parents=True)
    (place / "branching.fish").write_text(branching(REPOSITORY, "completion", "fish").out)
    done = subprocess.run(
        ["fish", "--command", f"complete -C {shlex.quote(typed)}"],
        env={
            **os.environ,
            "XDG_CONFIG_HOME": str(named_branching / "config"),
            "XDG_DATA_HOME": str(named_branching / "data"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert completed in [line.split("\t")[0] for line in done.stdout.splitlines()], done
