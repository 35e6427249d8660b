"""docs/troubleshooting.md has the messages of the programs: each of them is in a program, and the reverse."""

from __future__ import annotations

import ast
import re

import pytest

from conftest import ROOT

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
WRAPPER_SOURCES = ROOT / "branching-docker" / "src" / "branching_docker"
ANYTHING = "..."
"""In a message, what differs from case to case."""
BACKTICKED = re.compile(r"`([^`]+)`")
OF_SHELL = re.compile(r'fail "([^"]+)"|echo "branching: ([^"]+)" >&2')
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\w+")


def section(title: str) -> list[str]:
    """Returns the messages in the first column of a section's table."""
    text = DOCUMENT.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 3, title
    return [message for row in rows[1:] for message in BACKTICKED.findall(row)]


def holds(message: str, text: str) -> bool:
    """Returns whether a text contains the parts of a message, in order."""
    place = 0
    for part in message.split(ANYTHING):
        found = text.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return True


def literal(node: ast.expr) -> str:
    """Returns a text as the program has it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return literal(node.left) + literal(node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return literal(node.func.value)  # a text that is encoded, say
    return ANYTHING


def of_wrapper() -> set[str]:
    """Returns the messages of the wrapper's errors, and what it says beside."""
    found = set()
    for path in WRAPPER_SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in (
                    "SettingsError",
                    "WorkspaceError",
                    "EngineError",
                    "ImageError",
                    "WrapperError",
                    "BadParameter",
                    "say",
                ):
                    found.add(literal(node.args[0]))
    return found - {ANYTHING}


def of_image() -> set[str]:
    """Returns the messages of the image's own programs."""
    text = "".join((ROOT / "docker" / name).read_text() for name in ("entrypoint", "exec-command"))
    text = text.replace("$base", "/src").replace("$shown", "/src")
    found = {first or second for first, second in OF_SHELL.findall(text)}
    return {VARIABLE.sub(ANYTHING, message) for message in found} - {ANYTHING}


def of_commands() -> set[str]:
    """Returns the sources of the command and of BranchFS, each as one text."""
    sources = ("branching/**/*.py", "branchfs/src/**/*.rs", "branchfs/crates/**/*.rs")
    return {path.read_text() for pattern in sources for path in ROOT.glob(pattern)}


OWN = [("Messages of `branching-docker`", of_wrapper), ("Messages of the image", of_image)]


@pytest.mark.parametrize(("title", "messages"), OWN, ids=["wrapper", "image"])
def test_every_message_is_explained(title: str, messages: object) -> None:
    assert callable(messages)
    explained = section(title)
    said = messages()
    assert len(said) > 10
    assert [text for text in sorted(said) if not any(holds(message, text) for message in explained)] == []


@pytest.mark.parametrize(
    ("title", "messages"),
    [*OWN, ("Messages of `branching` and BranchFS", of_commands)],
    ids=["wrapper", "image", "command"],
)
def test_every_explained_message_exists(title: str, messages: object) -> None:
    assert callable(messages)
    said = messages()
    assert [message for message in section(title) if not any(holds(message, text) for text in said)] == []
