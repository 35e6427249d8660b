"""The documents on agents, and the examples, as a reader follows them."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.branchfs import REPOSITORY, find_program

DOCUMENTS = [
    REPOSITORY / "docs" / name
    for name in ("agents-quickstart.md", "agents-reference.md", "agent-frameworks.md")
]
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
SECONDS_MAX = 100


@pytest.fixture
def project(place: Path) -> Path:
    path = place / "project"
    path.mkdir()
    return path


def run(argv: list[str], cwd: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={
            **os.environ,
            "BRANCHFS": find_program(),
            "PATH": path,
            "PYTHONDONTWRITEBYTECODE": "1",  # the examples lie in the source tree
        },
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def follow(document: Path, project: Path) -> None:
    """Runs each block of code, in order."""
    followed = 0
    for match in FENCE.finditer(document.read_text()):
        kind, text = match["kind"], match["text"]
        assert kind in ("python", "sh", "text"), kind
        if kind != "text":
            run([sys.executable, "-c", text] if kind == "python" else ["sh", "-ec", text], project)
            followed += 1
    assert followed


@pytest.mark.timeout(6 * SECONDS_MAX)
def test_the_quickstart_works(project: Path) -> None:
    """Each block changes the directory in which it is followed."""
    follow(DOCUMENTS[0], project)
    assert (project / "greeting").read_text() == "hello\n"
    assert "two" in (project / "answer").read_text()
    assert (project / "result").read_text() == "done\n"
    assert (project / "out").read_text() == "cheap\n"


def test_every_block_of_the_reference_runs(project: Path) -> None:
    follow(DOCUMENTS[1], project)


def test_every_block_of_the_page_on_other_frameworks_runs(project: Path) -> None:
    follow(DOCUMENTS[2], project)
    assert (project / "greeting").read_text() == "good day\n"


def test_references_of_the_documents_are_there() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document}: {target}"


@pytest.mark.contract("7.11")
def test_the_offline_example_runs(project: Path) -> None:
    run(["git", "init", "-q"], project)
    said = run([sys.executable, str(REPOSITORY / "examples" / "fork_offline.py"), "."], project)
    assert "Merged: kept branch adds" in said
    assert "return a + b" in (project / "adder.py").read_text()
    assert run(["git", "log", "--format=%s"], project) == "It adds\n"
    assert run(["git", "status", "--porcelain"], project) == ""


@pytest.mark.parametrize("name", ["fork_openai_agents.py", "fork_langgraph.py"])
def test_the_example_of_a_framework_runs(project: Path, name: str) -> None:
    said = run([sys.executable, "-W", "error", str(REPOSITORY / "examples" / name), "."], project)
    assert "Merged: kept branch french" in said
    assert (project / "greeting").read_text() == "Bonjour\n"


def test_the_live_example_compiles_and_uses_what_there_is(place: Path) -> None:
    """The example is imported and run up to the model request, because there is no API key."""
    example = REPOSITORY / "examples" / "fork_live.py"
    py_compile.compile(str(example), cfile=str(place / "compiled"), doraise=True)
    project = place / "project"
    project.mkdir()
    script = f"""
import asyncio, importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("fork_live", {str(example)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
asyncio.run(module.main(Path("."), "Say hello.", "test"))
"""
    said = run([sys.executable, "-c", script], project)
    assert "shell" in said, "the test model calls each tool once"
