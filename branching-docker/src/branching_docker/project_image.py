"""`branching-docker init`: a Dockerfile that adds a project's tools to the image.

Three files are written to the project, none is replaced:

    branching.Dockerfile                 FROM branching, and the tools of the languages and agents
    branching.Dockerfile.dockerignore    keeps large directories out of the build, where BuildKit builds
    branching-docker.toml                image = the name of the new image, for later commands

Dependencies are installed from a copy of the project at /workspace, where commands see their branch: what is
installed editable there is found in each branch. The copy is removed from the image again.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from branching_docker.errors import WorkspaceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DOCKERFILE = "branching.Dockerfile"
IGNORE_FILE = f"{DOCKERFILE}.dockerignore"
SETTINGS_FILE = "branching-docker.toml"
IGNORED = (".branching", ".git", "**/node_modules", "**/target", "**/.venv", "**/__pycache__")

PYTHON_FILES = ("pyproject.toml", "setup.py", "requirements.txt")
EXTRAS = "dev,test,tests"
"""Extras of a Python project that its tests often need; pip only warns of those that it does not have."""
TEST_GROUPS, DEVELOPMENT_GROUP = ("test", "tests"), "dev"
"""Dependency groups of a Python project: those of its tests, and the one that includes them elsewhere."""
AGENT_PACKAGES = {
    "claude": "@anthropic-ai/claude-code",
    "codex": "@openai/codex",
    "gemini": "@google/gemini-cli",
    "opencode": "opencode-ai",
}
"""The npm packages of agents."""


@dataclass(frozen=True)
class ProjectImage:
    """The files to write, and the name of the image that they describe."""

    directory: Path
    name: str
    languages: tuple[str, ...]
    files: dict[str, str]

    def write(self) -> None:
        """Writes the files; WorkspaceError, and nothing written, if one of them exists or cannot be created."""
        for name in self.files:
            if (self.directory / name).is_symlink() or (self.directory / name).exists():
                raise WorkspaceError(
                    f"{self.directory / name} exists, and was not changed.",
                    hint="edit it, or remove it and run init again; --dry-run prints what init would write",
                )
        written: list[Path] = []
        try:
            for name, text in self.files.items():
                with (self.directory / name).open("x", encoding="utf-8") as file:
                    written.append(self.directory / name)
                    file.write(text)
        except OSError as error:
            for path in written:
                path.unlink(missing_ok=True)
            raise WorkspaceError(
                f"the files for {self.directory} could not be written.",
                cause=str(error),
                hint="run init as a user who may write there",
            ) from error

    def next_steps(self, engine: str) -> list[str]:
        """Returns the commands that build the image and use it; `engine` is Docker's or Podman's command."""
        at = shlex.quote(str(self.directory))
        build = project_image_build(engine, self.name, self.directory)
        return [build, f"branching-docker -w {at} run -- CMD"]


def project_image_build(engine: str, name: str, directory: Path) -> str:
    """Returns the command that builds the image of a project from the Dockerfile in its directory."""
    at = shlex.quote(str(directory))
    return f"{engine} build -t {name} -f {shlex.quote(str(directory / DOCKERFILE))} {at}"


def dependency_groups(path: Path) -> list[str]:
    """Returns the dependency groups that a project's tests need, from its `pyproject.toml`.

    Python 3.10 cannot read TOML: the names of the groups are found by the form in which they are usually written.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    section = re.search(r"^\[dependency-groups\][ \t]*(?:#.*)?\n((?:(?!\[\w).*\n?)*)", text, re.MULTILINE)
    names = re.findall(r"^([\w-]+)[ \t]*=", section[1], re.MULTILINE) if section else []
    found = [name for name in names if name in TEST_GROUPS]
    return found or [name for name in names if name == DEVELOPMENT_GROUP]


def plan_project_image(directory: Path, *, base: str, agents: Sequence[str]) -> ProjectImage:
    """Returns the files for a project, by the languages whose files are in its directory.

    Args:
        directory: The project.
        base: The image to add tools to.
        agents: Names from AGENT_PACKAGES to install.
    """
    python = [name for name in PYTHON_FILES if (directory / name).is_file()]
    has_rust = (directory / "Cargo.toml").is_file()
    has_node = (directory / "package.json").is_file()
    packages = [
        *(["python3-pip", "python3-venv"] if python else []),
        *(["cargo", "rustc", "gcc", "libc6-dev"] if has_rust else []),
        *(["nodejs", "npm"] if has_node or agents else []),
    ]
    lines = [
        "# The image for this project's commands: tools of the project, added to the image of branching.",
        f"ARG BRANCHING={base}",
        "FROM ${BRANCHING}",
        "# Debian packages. Add what the project's commands need, for example a compiler or a client of a database.",
        "RUN apt-get update && apt-get install -y --no-install-recommends \\",
        f"        {' '.join(['ca-certificates', *packages])} && rm -rf /var/lib/apt/lists/*",
    ]
    if agents:
        lines += ["# Agents.", f"RUN npm install -g {' '.join(AGENT_PACKAGES[agent] for agent in agents)}"]
    install = []
    if python:
        lines += ["ENV PATH=/opt/tools/bin:$PATH"]
        install.append("python3 -m venv /opt/tools && pip install --no-cache-dir pytest")
        if "requirements.txt" in python:
            install.append("pip install --no-cache-dir -r requirements.txt")
        if groups := dependency_groups(directory / "pyproject.toml"):
            install.append("pip install --no-cache-dir " + " ".join(f"--group {group}" for group in groups))
        if python != ["requirements.txt"]:
            install.append(f"pip install --no-cache-dir -e '.[{EXTRAS}]'")
    if has_rust:
        lines += ["ENV CARGO_HOME=/opt/cargo"]
        install.append("cargo fetch")
    if install:
        lines += [
            "# Dependencies, from a copy of the project at the path where commands see their branch.",
            "COPY . /workspace",
            f"RUN cd /workspace && {' && '.join(install)} \\",
            "    && find /workspace -mindepth 1 -delete",
        ]
    name = "branching-" + (re.sub(r"[^a-z0-9]+", "-", directory.name.lower()).strip("-") or "project")
    languages = [*(["Python"] if python else []), *(["Rust"] if has_rust else []), *(["Node"] if has_node else [])]
    files = {
        DOCKERFILE: "\n".join(lines) + "\n",
        IGNORE_FILE: "\n".join(IGNORED) + "\n",
        SETTINGS_FILE: f"image = {json.dumps(name)}\n",
    }
    return ProjectImage(directory, name, tuple(languages), files)
