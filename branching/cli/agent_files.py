"""Configuration files and skills of coding agents, written for `branching mcp` and `skill`.

    agent      of the project              of the user
    claude     .mcp.json                   ~/.claude.json
    codex      .codex/config.toml          ~/.codex/config.toml
    cursor     .cursor/mcp.json            ~/.cursor/mcp.json
    gemini     .gemini/settings.json       ~/.gemini/settings.json
    opencode   opencode.json               ~/.config/opencode/opencode.json
    vscode     .vscode/mcp.json            ~/.config/Code/User/mcp.json

What else is in a file stays. A file is replaced in one step and keeps its mode; a symbolic link to
it stays one. A file that cannot be read as its format has it is not written.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from branching.cli.error_handling import UsageFault, refuse_in_container
from branching.errors import BranchingError

SERVER_NAME = "branching"
TOOL_SECONDS_MAX = 3600
"""The longest that a tool takes without `--max-time` of the server."""


class Scope(str, Enum):
    """Whose configuration is written."""

    project = "project"
    user = "user"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Where an agent looks for servers and skills."""

    project: str
    """Its file in a project."""
    user: str
    """Its file in the home directory."""
    key: str = "mcpServers"
    """The object in the file that has the servers, by name."""
    skills: str = ".agents/skills"
    """The directory of skills, in a project and in the home directory."""
    directory: str | None = None
    """How the agent names the project's directory in arguments; None for its path."""


AGENTS = {
    "claude": Agent(
        project=".mcp.json", user=".claude.json", skills=".claude/skills", directory="."
    ),
    "codex": Agent(project=".codex/config.toml", user=".codex/config.toml", key="mcp_servers"),
    "cursor": Agent(
        project=".cursor/mcp.json", user=".cursor/mcp.json", directory="${workspaceFolder}"
    ),
    "gemini": Agent(project=".gemini/settings.json", user=".gemini/settings.json"),
    "opencode": Agent(project="opencode.json", user=".config/opencode/opencode.json", key="mcp"),
    "vscode": Agent(
        project=".vscode/mcp.json",
        user=".config/Code/User/mcp.json",
        key="servers",
        directory="${workspaceFolder}",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of a file, or would become of it."""

    path: Path
    before: str
    after: str


def refuse_files_in_container() -> None:
    """Raises UsageFault where the files of the agent are outside."""
    refuse_in_container(
        "the files of agents on the host cannot be written from the container; docs/mcp.md shows "
        "the configuration that starts branching-docker"
    )


def project_around(workspace: Path | None) -> Path:
    """Returns the project's directory. UsageFault if there is none."""
    project = Path(os.path.abspath(workspace or Path.cwd()))  # noqa: PTH100  (links stay)
    if not project.is_dir():
        raise UsageFault(f"{project} is not a directory")
    return project


def installed_server(
    name: str,
    scope: Scope,
    project: Path,
    options: Sequence[str],
    *,
    tool_seconds_max: int,
    is_named: bool,
    is_dry: bool,
) -> Written:
    """Adds the server to an agent's configuration, or replaces it there.

    Args:
        name: The agent.
        scope: Whose configuration is written.
        project: The directory that the server works on.
        options: Further options of the server.
        tool_seconds_max: How long the agent waits for a tool, where its configuration has that.
        is_named: Whether the user has named the directory. Where not, a server of the user's own
            configuration works on the directory in which the agent starts it.
        is_dry: Whether nothing is written.

    Raises:
        BranchingError: The file cannot be read or written; it is as it was.
    """
    agent = AGENTS[name]
    is_project = scope is Scope.project
    path = project / agent.project if is_project else Path.home() / agent.user
    if is_named and not is_project:
        where = ["-w", str(project)]
    elif is_project or agent.directory not in (None, "."):
        where = ["-w", agent.directory or str(project)]
    else:
        where = []
    argv = ["branching" if is_project else _program(), "mcp", *where, *options]
    before = _read(path)
    if path.suffix == ".toml":
        after = _with_table(before, argv, tool_seconds_max, path)
    else:
        after = _with_member(before, agent.key, _entry(name, argv, tool_seconds_max), path)
    if not is_dry:
        _replace(path, before, after)
    return Written(path=path, before=before, after=after)


def installed_skill(name: str, scope: Scope, project: Path, *, is_dry: bool) -> Written:
    """Writes the skill to where an agent looks for skills. BranchingError if that fails."""
    base = project if scope is Scope.project else Path.home()
    path = base / AGENTS[name].skills / "branching" / "SKILL.md"
    before, after = _read(path), skill_text()
    if not is_dry:
        _replace(path, before, after)
    return Written(path=path, before=before, after=after)


def skill_text() -> str:
    """Returns the skill, as it is installed with the package or lies in the source tree."""
    package = Path(__file__).parents[1]
    for path in (package / "skill" / "SKILL.md", package.parent / "skills/branching/SKILL.md"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise BranchingError(
        "the skill is not part of this installation", hint="install branching from a wheel"
    )


def tell_written(written: Written, *, is_dry: bool) -> None:
    """Prints what became of a file, or with `is_dry` how it would change."""
    if written.before == written.after:
        print(f"unchanged: {written.path}")
    elif not is_dry:
        print(f"wrote: {written.path}")
    else:
        lines = difflib.unified_diff(
            written.before.splitlines(keepends=True),
            written.after.splitlines(keepends=True),
            str(written.path) if written.before else "/dev/null",
            str(written.path),
        )
        for line in lines:
            print(line if line.endswith("\n") else f"{line}\n", end="")


def _program() -> str:
    """Returns the program, by a path that needs no PATH of ours."""
    return shutil.which("branching") or str(Path(sys.executable).with_name("branching"))


def _entry(name: str, argv: Sequence[str], tool_seconds_max: int) -> dict[str, Any]:
    if name == "opencode":
        timeout = tool_seconds_max * 1000
        return {"type": "local", "command": [*argv], "enabled": True, "timeout": timeout}
    entry: dict[str, Any] = {"command": argv[0], "args": [*argv[1:]]}
    if name == "vscode":
        entry = {"type": "stdio", **entry}
    elif name == "gemini":
        entry["timeout"] = tool_seconds_max * 1000
    return entry


def _with_member(text: str, key: str, entry: dict[str, Any], path: Path) -> str:
    """Returns a JSON document with the server in it."""
    try:
        document = json.loads(text) if text.strip() else {}
        servers = document.setdefault(key, {})
        servers[SERVER_NAME] = {**servers.get(SERVER_NAME, {}), **entry}
    except (ValueError, AttributeError, TypeError) as error:
        raise BranchingError(
            f"{path} was not changed: it is not a JSON object as expected ({error}), or has "
            "comments",
            hint=f'add this to "{key}" by hand: "{SERVER_NAME}": {json.dumps(entry)}',
            path=str(path),
        ) from error
    if text.strip() and json.loads(text) == document:
        return text  # as it is written there
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


_OURS = re.compile(r"(command|args|startup_timeout_sec|tool_timeout_sec)\s*=")
"""The lines of the table that are written here; others are the user's."""
_HEADER = f"[mcp_servers.{SERVER_NAME}]"


def _with_table(text: str, argv: Sequence[str], tool_seconds_max: int, path: Path) -> str:
    """Returns a TOML document with the server in it: its table is replaced, or added at the end."""
    table = "".join(
        f"{line}\n"
        for line in (
            _HEADER,
            f"command = {json.dumps(argv[0])}",
            f"args = {json.dumps([*argv[1:]])}",
            "startup_timeout_sec = 30",
            f"tool_timeout_sec = {tool_seconds_max}",
        )
    )
    found = re.search(rf"^{re.escape(_HEADER)}[^\n]*\n(?:(?!\[).*\n?)*", text, re.MULTILINE)
    if found:
        own = [line for line in found[0].splitlines()[1:] if line and not _OURS.match(line)]
        kept = "".join(f"{line}\n" for line in own)
        after_it = "\n" if text[found.end() :] else ""
        after = f"{text[: found.start()]}{table}{kept}{after_it}{text[found.end() :]}"
    else:
        gap = "" if not text else "\n" if text.endswith("\n") else "\n\n"
        after = f"{text}{gap}{table}"
    if sys.version_info >= (3, 11):
        import tomllib

        try:
            tomllib.loads(after)
        except tomllib.TOMLDecodeError as error:
            raise BranchingError(
                f"{path} was not changed: it is not TOML as expected ({error})",
                hint=f"add this by hand:\n{table}",
                path=str(path),
            ) from error
    return after


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise BranchingError(
            f"{path} cannot be read: {error}. Nothing was changed", path=str(path)
        ) from error


def _replace(path: Path, before: str, after: str) -> None:
    """Writes the file in one step, with the mode that it had."""
    if before == after:
        return
    place = Path(os.path.realpath(path))
    beside = place.with_name(f".{place.name}.{os.getpid()}.new")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(after, encoding="utf-8")
        if place.exists():
            beside.chmod(stat.S_IMODE(place.stat().st_mode))
        beside.replace(place)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise BranchingError(
            f"{path} was not written: {error.strerror or error}. It is as it was", path=str(path)
        ) from error
