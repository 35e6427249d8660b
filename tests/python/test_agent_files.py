"""Configurations and skills that `branching mcp install` and `branching skill install` write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters
from support.branchfs import find_program
from support.command import Done, branching
from support.tools import connected

SKILL = Path(__file__).parents[2] / "skills" / "branching" / "SKILL.md"
FILES = {
    "claude": (".mcp.json", ".claude.json", "mcpServers"),
    "codex": (".codex/config.toml", ".codex/config.toml", "mcp_servers"),
    "cursor": (".cursor/mcp.json", ".cursor/mcp.json", "mcpServers"),
    "gemini": (".gemini/settings.json", ".gemini/settings.json", "mcpServers"),
    "opencode": ("opencode.json", ".config/opencode/opencode.json", "mcp"),
    "vscode": (".vscode/mcp.json", ".config/Code/User/mcp.json", "servers"),
}
OPTIONS = ["--network", "--hide", "**/.env", "--env", "HOME", "--max-time", "5m"]
WRITTEN = ["--max-time", "300", "--hide", "**/.env", "--network", "--env", "HOME"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    return path


def install(project: Path, home: Path, *words: str) -> Done:
    return branching(project, "mcp", "install", *words, HOME=str(home))


def read(path: Path) -> dict[str, Any]:
    text = path.read_text()
    if path.suffix == ".json":
        document: dict[str, Any] = json.loads(text)
        return document
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    from pip._vendor import tomli

    return tomli.loads(text)


def argv_of(agent: str, path: Path) -> list[str]:
    entry = read(path)[FILES[agent][2]]["branching"]
    command = entry["command"]
    return [*command] if isinstance(command, list) else [command, *entry["args"]]


@pytest.mark.parametrize("agent", FILES)
def test_the_server_is_added_once_with_its_options(agent: str, project: Path, home: Path) -> None:
    path = project / FILES[agent][0]
    done = install(project, home, agent, *OPTIONS)
    assert (done.code, done.out, done.err) == (0, f"wrote: {path}\n", "")
    first = path.read_text()
    where = {"claude": ".", "cursor": "${workspaceFolder}", "vscode": "${workspaceFolder}"}
    words = ["branching", "mcp", "-w", where.get(agent, str(project)), *WRITTEN]
    assert argv_of(agent, path) == words
    assert install(project, home, agent, *OPTIONS).out == f"unchanged: {path}\n"
    assert path.read_text() == first
    assert install(project, home, agent).code == 0  # other options take the place of the first
    assert argv_of(agent, path) == words[:4]
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("agent", FILES)
def test_the_users_own_configuration_serves_every_project(
    agent: str, project: Path, home: Path
) -> None:
    path = home / FILES[agent][1]
    assert install(project, home, agent, "--scope", "user", "--propose").code == 0
    program, *words = argv_of(agent, path)
    assert Path(program).is_absolute()
    anywhere = ["-w", "${workspaceFolder}"] if agent in ("cursor", "vscode") else []
    assert words == ["mcp", *anywhere, "--propose"]
    assert list(project.iterdir()) == []
    assert install(project, home, agent, "--scope", "user", "-w", ".").code == 0
    assert argv_of(agent, path)[1:] == ["mcp", "-w", str(project)]


@pytest.mark.parametrize(
    ("agent", "key", "per_second"),
    [("codex", "tool_timeout_sec", 1), ("gemini", "timeout", 1000), ("opencode", "timeout", 1000)],
)
@pytest.mark.parametrize(("options", "seconds"), [((), 3600), (("--max-time", "3h"), 10800)])
def test_the_agent_waits_for_a_tool_as_long_as_a_command_may_take(
    agent: str,
    key: str,
    per_second: int,
    options: tuple[str, ...],
    seconds: int,
    project: Path,
    home: Path,
) -> None:
    """These agents give up a call after a minute or less by default."""
    assert install(project, home, agent, *options).code == 0
    path = project / FILES[agent][0]
    assert read(path)[FILES[agent][2]]["branching"][key] == seconds * per_second


@pytest.mark.parametrize("agent", ["claude", "codex"])
def test_other_settings_in_the_file_are_unchanged(agent: str, project: Path, home: Path) -> None:
    real = project / "elsewhere"
    path = project / FILES[agent][0]
    path.parent.mkdir(exist_ok=True)
    other = '{"theme": "é", "mcpServers": {"other": {"command": "x"}, "branching": {"env": {}}}}'
    if agent == "codex":
        other = '# mine\nmodel = "é"\n[mcp_servers.branching]\ncommand = "old"\nenv_vars = ["A"]\n'
        other += '\n[mcp_servers.branching.env]\nB = "1"\n\n[mcp_servers.other]\ncommand = "x"'
    real.write_text(other)
    real.chmod(0o640)
    path.symlink_to(real)
    for _ in range(2):
        assert install(project, home, agent).code == 0
        document = read(path)
        servers = document[FILES[agent][2]]
        assert servers["other"] == {"command": "x"}
        assert servers["branching"]["command"] == "branching"
        assert "é" in (document["theme" if agent == "claude" else "model"])
        assert "env" in servers["branching"]
        if agent == "codex":
            assert servers["branching"]["env_vars"] == ["A"]
            assert real.read_text().startswith("# mine\n")
    assert path.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in project.iterdir()) == sorted(
        ["elsewhere", path.relative_to(project).parts[0]]
    )


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("vscode", '{\n  // mine\n  "servers": {}\n}\n'),
        ("claude", '{"mcpServers": []}'),
        ("claude", "[]"),
        ("cursor", '{"mcpServers": {"branching": 3}}'),
        pytest.param(
            *("codex", "mcp_servers = {}\n"),
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no TOML parser"),
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_not_written(
    agent: str, text: str, project: Path, home: Path
) -> None:
    path = project / FILES[agent][0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    done = install(project, home, agent)
    assert done.code == 125
    assert f"{path} was not changed" in done.err
    assert "by hand" in done.err
    assert path.read_text() == text


def test_a_dry_run_shows_the_change_and_writes_nothing(project: Path, home: Path) -> None:
    done = install(project, home, "claude", "--dry-run")
    assert done.code == 0
    assert '+    "branching": {' in done.out.splitlines()
    assert list(project.iterdir()) == []
    done = branching(project, "skill", "install", "claude", "--dry-run")
    assert "+name: branching" in done.out.splitlines()
    assert list(project.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["mcp", "install"],
        ["mcp", "install", "emacs"],
        ["mcp", "claude"],
        ["mcp", "install", "claude", "--http", "0"],
        ["mcp", "--dry-run"],
        ["mcp", "--env-all", "--env", "X"],
        ["skill", "install"],
        ["skill", "remove", "claude"],
    ],
)
def test_invalid_arguments_are_refused(words: list[str], project: Path) -> None:
    done = branching(project, *words)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert list(project.iterdir()) == []


@pytest.mark.anyio
@pytest.mark.timeout(600)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_server_that_was_installed_starts(place: Path) -> None:
    home = place / "home"
    home.mkdir()
    done = install(place, home, "codex", "--propose", "--memory-limit", "1G")
    assert done.code == 0, done.err
    words = argv_of("codex", place / ".codex/config.toml")
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", *words],
        env={"BRANCHFS": find_program(), "TMPDIR": os.environ["TMPDIR"]},
        cwd=home,
    )
    async with connected(server) as agent:
        tools = {tool.name for tool in (await agent.client.list_tools()).tools}
        assert (await agent.call("branch_list"))["workspace"] == str(place)
    assert "branch_run" in tools
    assert "branch_commit" not in tools


@pytest.mark.parametrize(
    ("agent", "directory"), [("claude", ".claude/skills"), ("codex", ".agents/skills")]
)
def test_the_skill_is_written_where_the_agent_looks(
    agent: str, directory: str, project: Path, home: Path
) -> None:
    for words, base in (([], project), (["--scope", "user"], home)):
        path = base / directory / "branching" / "SKILL.md"
        for said in ("wrote", "unchanged"):
            done = branching(project, "skill", "install", agent, *words, HOME=str(home))
            assert (done.code, done.out) == (0, f"{said}: {path}\n")
        assert path.read_text() == SKILL.read_text()
    assert branching(project, "skill", "show").out == SKILL.read_text()
