"""The skill, the recipes and the documents of the server, as a reader follows them.

Commands are run, in order, in one project a document; configurations are read as their format has
it, and the server that they name is started. The agents are stand-ins: what they are started with
is what the recipes say.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import mcp.client.stdio
import pytest
from mcp import StdioServerParameters
from support.branchfs import find_program
from support.tools import SECONDS_MAX, connected

REPOSITORY = Path(__file__).parents[2]
SKILL = REPOSITORY / "skills" / "branching" / "SKILL.md"
RECIPES = REPOSITORY / "docs" / "recipes.md"
TOOLS = REPOSITORY / "docs" / "mcp.md"
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = "/home/me/project"
DOCUMENT_SECONDS_MAX = 580
pytestmark = pytest.mark.timeout(600)  # a document is a dozen commands, one after another

AGENTS = {
    # What an agent does: it keeps something somewhere, and changes a file. Where it is told to, it
    # writes down what it was started with: in the directory, for its own /tmp is gone with it.
    "works": """
place=$1 name=$2; shift 2
test -z "$RECORDS" || { printf '%s\\0' "$name" "$@" >argv; env -0 >environment; }
mkdir -p "$place" && touch "$place/state" && echo "# $name $BRANCHING_ATTEMPT" >>sums.py""",
    "agent": 'test -n "$1" && works "$TMPDIR/a" any && sed -i "s/a - b/a + b/" sums.py',
    "claude": """
case "$*" in mcp\\ add*) shift 4; printf "%s\\n" "$@" >"$TOLD"; exit;; esac
works "$CLAUDE_CONFIG_DIR" claude "$@\"""",
    "codex": 'test -d "$CODEX_HOME" && works "$CODEX_HOME" codex "$@"',
    "gemini": 'works "$HOME/.gemini" gemini "$@"',
    "opencode": 'works "$HOME/.local" opencode "$@"',
    "cursor-agent": 'works "$HOME/.cursor" cursor-agent "$@"',
    "aider": 'works "$HOME/.aider" aider "$@"',
}
TASK = "mend 'it' $now"
STARTED = {
    "Claude Code": ["claude", "-p", TASK, "--dangerously-skip-permissions"],
    "Codex": [
        *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        TASK,
    ],
    "Gemini CLI": ["gemini", "-p", TASK, "--yolo"],
    "OpenCode": ["opencode", "run", TASK],
    "Cursor": ["cursor-agent", "-p", "--force", TASK],
    "Aider": ["aider", "--yes-always", "--no-auto-commits", "--message", TASK],
}
"""What each agent is to be started with."""
SCRIPTS = {
    "fix-a": "exit 1",
    "fix-b": "echo '# b' >>sums.py",
    "tune": 'seq "$1" 5',
    "repair": 'test -n "$1" && echo "# repaired: it said $1" | head -n 1 >>sums.py',
}


def blocks(document: Path, kind: str) -> list[str]:
    fences = FENCE.finditer(document.read_text())
    found = [match["text"] for match in fences if match["kind"] == kind]
    assert found, f"{document} has no block of {kind}"
    return found


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The programs on a reader's PATH: `branching` and the agents."""
    place = tmp_path / "programs"
    place.mkdir()
    (place / "branchfs").symlink_to(find_program())
    for name, text in {"branching": f'exec {sys.executable} -m branching "$@"', **AGENTS}.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    return place


@pytest.fixture
def project(place: Path) -> Path:
    """A project with a mistake in it."""
    root = place / "project"
    root.mkdir()
    (root / "sums.py").write_text("def add(a, b):\n    return a - b\n")
    check = f'{sys.executable} -B -c "import sums; assert sums.add(2, 3) == 5"'
    (root / "Makefile").write_text(f"test:\n\t@{check}\n\t@echo 1 passed\n")
    for name, text in SCRIPTS.items():
        (root / name).write_text(f"#!/bin/sh\n{text}\n")
        (root / name).chmod(0o755)
    return root


@pytest.fixture
def environment(programs: Path, tmp_path: Path) -> dict[str, str]:
    path = f"{programs}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TOLD": str(tmp_path / "told"), "BRANCHFS": "branchfs"}


def bash(script: str, project: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-xeuo", "pipefail", "-c", script],
        cwd=project,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DOCUMENT_SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_command_of_the_skill_works(project: Path, environment: dict[str, str]) -> None:
    said = bash("\n".join(blocks(SKILL, "sh")), project, environment)
    assert "candidate 1 won" in said  # of the race
    assert said.count("attempt 0 won (12.00)") == 2
    assert "attempt 1: ok (committed)" in said  # the critique was heard
    text = (project / "sums.py").read_text()
    assert "return a + b" in text
    assert "# repaired: it said 1 passed" in text
    assert text.count("# b\n") == 3  # the race, the fork, and the branch that was kept
    assert (project / "prepared").exists()


@pytest.mark.contract("7.11")
def test_the_skill_is_one(tmp_path: Path) -> None:
    """A short text behind a head of the form that Agent Skills has."""
    text = SKILL.read_text()
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    facts = dict(line.split(": ", 1) for line in head.splitlines())
    assert set(facts) == {"name", "description", "license", "compatibility"}
    assert facts["name"] == SKILL.parent.name
    assert len(facts["description"]) <= 1024
    assert len(facts["compatibility"]) <= 500
    assert facts["license"] in (REPOSITORY / "pyproject.toml").read_text()
    assert len(body.splitlines()) <= 100


@pytest.mark.slow
def test_every_command_of_the_recipes_works(
    project: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    said = bash("\n".join(blocks(RECIPES, "sh")), project, environment)
    assert said.count(" won · committed") == 2
    assert "return a + b" in (project / "sums.py").read_text()
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["branching", "mcp", "-w", str(project)]


def agents() -> list[Any]:
    rows = re.findall(
        r"^\| ([\w ]+) \| `([^`]*\$TASK[^`]*)` (.*) \| .+ \|$", RECIPES.read_text(), re.M
    )
    assert [name for name, _, _ in rows] == list(STARTED)
    return [pytest.param(*row, id=row[0]) for row in rows]


@pytest.mark.parametrize(("name", "command", "about"), agents())
def test_every_agent_is_started_as_its_recipe_says(
    project: Path, environment: dict[str, str], name: str, command: str, about: str
) -> None:
    """With the task as one word, its key, and a place for its state, which goes with the run."""
    before = (project / "sums.py").read_text()
    key = (re.findall(r"`(\w+_KEY)`", about) or ["SOME_API_KEY"])[0]
    script = f"export RECORDS=1 TASK={shlex.quote(TASK)} {key}=secret\n"
    script += f"branching run -- sh -c {shlex.quote(f'{command} && make -n test')}"
    bash(script, project, environment)
    assert (project / "sums.py").read_text() == f"{before}# {STARTED[name][0]} 0\n"
    assert (project / "argv").read_text().split("\0")[:-1] == STARTED[name]
    told = dict(
        each.split("=", 1) for each in (project / "environment").read_text().split("\0")[:-1]
    )
    assert (told[key], told["BRANCHING"], told["BRANCHING_WORKSPACE"]) == (
        "secret",
        "1",
        str(project),
    )
    moved = {"Claude Code": "CLAUDE_CONFIG_DIR", "Codex": "CODEX_HOME"}.get(name, "HOME")
    assert Path(told[moved]).is_relative_to(told["TMPDIR"])
    assert not Path(told["TMPDIR"]).is_relative_to(project)


def configurations(document: Path) -> Iterator[Any]:
    found = [json.loads(text) for text in blocks(document, "json")]
    if document == RECIPES:
        toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        found += [toml.loads(text) for text in blocks(document, "toml")]
    for number, configuration in enumerate(found):
        yield pytest.param(command_in(configuration), id=f"{document.stem}-{number}")


def command_in(configuration: dict[str, Any]) -> list[str]:
    """Returns the command of the one server in a configuration, whatever agent it is for."""
    command = configuration.get("command")
    if command is None:
        (inner,) = [value for value in configuration.values() if isinstance(value, dict)]
        return command_in(inner)
    return list(command) if isinstance(command, list) else [command, *configuration["args"]]


CONFIGURATIONS = [*configurations(RECIPES), *configurations(TOOLS)]


@pytest.mark.parametrize("command", CONFIGURATIONS)
def test_every_configuration_starts_the_server(
    project: Path,
    environment: dict[str, str],
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command[0] == "branching-docker":
        assert command == ["branching-docker", "-w", PLACEHOLDER, "mcp"]  # tested by tests/docker
        return
    words = [str(project) if word == PLACEHOLDER else word for word in command]
    monkeypatch.setattr(mcp.client.stdio, "PROCESS_TERMINATION_TIMEOUT", SECONDS_MAX)
    server = StdioServerParameters(command=words[0], args=words[1:], env=environment, cwd=project)

    async def use() -> None:
        monkeypatch.setenv("PATH", environment["PATH"])
        async with connected(server) as agent:
            listed = await agent.call("branch_list")
            assert listed["workspace"] == str(project)

    anyio.run(use)


def test_every_block_has_a_kind() -> None:
    for document in (SKILL, RECIPES, TOOLS):
        text = document.read_text()
        assert text.count("\n```") == 2 * len(FENCE.findall(text)), document
        kinds = {kind for kind, _ in FENCE.findall(text)}
        assert kinds <= {"sh", "json", "toml", "text"}, document
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document}: {target}"
