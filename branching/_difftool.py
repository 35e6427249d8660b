"""Finds and starts programs that show differences between files.

    custom      the shell command in BRANCHING_DIFFTOOL or PYDANTIC_DEEP_DIFFTOOL; {parent} and
                {branches} are replaced by paths, which are appended if neither occurs
    pycharm     `pycharm diff`, all versions in one window; of three, the parent is in the middle
    vscode      `code --diff`, one window for each branch
    tui         no program; the caller shows the differences itself

The paths are two or more versions of one file or directory.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

EditorKind = Literal["custom", "pycharm", "vscode", "tui"]

VARIABLES = ("BRANCHING_DIFFTOOL", "PYDANTIC_DEEP_DIFFTOOL")
"""The first that is set and not empty counts."""

_PROGRAMS: tuple[tuple[EditorKind, str], ...] = (("pycharm", "pycharm"), ("vscode", "code"))


class EditorDetector:
    """Finds an editor and starts it."""

    @staticmethod
    def detect(env: Mapping[str, str] | None = None) -> EditorKind:
        """Returns the kind of the available diff tool, by `env` (default: our environment)."""
        env = os.environ if env is None else env
        if _custom(env):
            return "custom"
        for kind, program in _PROGRAMS:
            if shutil.which(program, path=env.get("PATH", os.defpath)):
                return kind
        return "tui"

    @staticmethod
    def invoke(
        kind: EditorKind,
        parent: Path | None,
        branch_paths: Sequence[Path],
        *,
        custom_cmd: str | None = None,
        wait: bool = False,
    ) -> list[subprocess.Popen[bytes]]:
        """Starts the editor on the versions of a file; returns its processes, none for "tui".

        `wait` has editors that hand the files to a window already open stay until it is closed.
        OSError when the program cannot be started, ValueError for "custom" without a command.
        """
        branches = [str(path) for path in branch_paths]
        if kind == "custom":
            command = custom_cmd or _custom(os.environ)
            if not command:
                raise ValueError(f"there is no command for a custom editor: set {VARIABLES[0]}")
            return [subprocess.Popen(_filled(command, parent, branches), shell=True)]
        return [subprocess.Popen(argv) for argv in _argvs(kind, parent, branches, wait=wait)]


def _custom(env: Mapping[str, str]) -> str | None:
    return next((env[name] for name in VARIABLES if env.get(name)), None)


def _filled(command: str, parent: Path | None, branches: list[str]) -> str:
    # The shell reads the line, so each path is one word of it, whatever is in its name.
    known = {
        "{parent}": "" if parent is None else shlex.quote(str(parent)),
        "{branches}": shlex.join(branches),
    }
    if not any(mark in command for mark in known):
        command += " {parent} {branches}"
    for mark, words in known.items():
        command = command.replace(mark, words)
    return command


def _argvs(
    kind: EditorKind, parent: Path | None, branches: list[str], *, wait: bool
) -> list[list[str]]:
    options = ["--wait"] if wait else []
    if kind == "pycharm":
        versions = branches if parent is None else [str(parent), *branches]
        if parent is not None and len(branches) == 2:
            versions = [branches[0], str(parent), branches[1]]
        return [["pycharm", "diff", *options, *versions]]
    if kind == "vscode":
        origin, rest = (str(parent), branches) if parent else ("".join(branches[:1]), branches[1:])
        if rest:
            return [["code", *options, "--diff", origin, branch] for branch in rest]
        return [["code", *options, origin]] if origin else []
    return []
