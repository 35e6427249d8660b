"""The documents as a reader follows them: every code block of docs/ is run, in order, one fresh directory a document.

    sh          by bash, which stops at the first command that fails
    python      by the image's Python, in a branching workspace
    yaml        what stands under `run: |` and `- |` is run as sh, with the image's name in IMAGE
    text, toml  are no code
A block whose run would repeat another test's says which: <!-- tested by: FILE, FILE -->.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from conftest import ROOT, WRAPPER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCUMENT_SECONDS = 380
pytestmark = pytest.mark.timeout(400)  # a document is a dozen containers, one after another
FENCE = re.compile(r"(?:<!-- tested by: (?P<elsewhere>.*?) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
YAML_SCRIPT = re.compile(r"^(?P<indent> *)(?:- |run: )\|\n(?P<text>(?:(?P=indent) +.*\n|\n)+)", re.M)
RUN = ("sh", "python", "yaml")
NOT_RUN = ("text", "toml")
DERIVED = "branching-with-bc"
"""The image that docs/image.md makes."""
OF_OTHERS = ("commands.md", "limits.md", "security.md", "benchmarks.md")
"""Documents with tests of their own, or without code."""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    kind: str
    text: str
    elsewhere: tuple[str, ...]


def blocks(document: Path) -> list[Block]:
    """Returns the blocks of a document."""
    return [
        Block(match["kind"], match["text"], tuple((match["elsewhere"] or "").split(", ") if match["elsewhere"] else ()))
        for match in FENCE.finditer(document.read_text())
    ]


DOCUMENTS = [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in OF_OTHERS]
SCRIPTED = [path for path in DOCUMENTS if any(block.kind in ("sh", "yaml") for block in blocks(path))]
IN_PYTHON = [path for path in DOCUMENTS if any(block.kind == "python" for block in blocks(path))]


@pytest.fixture
def place(image: str, tmp_path: Path) -> Iterator[Path]:
    """A directory of user 1000's to follow a document in; whatever containers it leaves warm are ended."""
    root = tmp_path / "reader"
    root.mkdir()
    os.chown(root, 1000, 1000)
    yield root
    for path in (root, *filter(os.path.isdir, root.glob("*"))):
        subprocess.run([WRAPPER, "--image", image, "-w", path, "down"], capture_output=True, timeout=60)
    subprocess.run(["docker", "image", "rm", DERIVED], capture_output=True, timeout=60)


def script(document: Path, image: str) -> str:
    """Returns what a reader would type, with the image under test in the default's place."""
    lines = []
    for block in blocks(document):
        if block.kind == "sh" and not block.elsewhere:
            lines.append(block.text)
        if block.kind == "yaml":
            scripts = [textwrap.dedent(match["text"]) for match in YAML_SCRIPT.finditer(block.text)]
            assert scripts, block.text
            # A pipeline's step has a checkout of its own.
            lines += [
                f"(rm -rf step && cp -r checkout step && cd step && {{\n{text}}}\nmv branching.json ..)"
                for text in scripts
            ]
    return re.sub(r"(?<=\s)branching(?= (?:run|--version)|\n)|(?<==)branching(?=[ \n])", image, "\n".join(lines))


@pytest.mark.parametrize("document", SCRIPTED, ids=lambda path: path.stem)
def test_every_command_of_a_document_works(document: Path, image: str, place: Path) -> None:
    if document.stem == "ci":
        checkout = place / "checkout"
        checkout.mkdir()
        (checkout / "Makefile").write_text("test:\n\t@grep -q right answer.txt\n")
        (checkout / "answer.txt").write_text("wrong\n")
    environ = os.environ | {"PATH": f"{WRAPPER.parent}:{os.environ['PATH']}", "BRANCHING_IMAGE": image, "IMAGE": image}
    done = subprocess.run(
        ["bash", "-xeuo", "pipefail", "-c", script(document, image)],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DOCUMENT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    if document.stem == "ci":
        # The second recipe runs the test on a checkout that is wrong: its exit code says so, as a pipeline wants it.
        assert json.loads((place / "branching.json").read_text())["committed"] is True
        assert (place / "step" / "answer.txt").read_text() == "wrong\n"
    assert done.returncode == (2 if document.stem == "ci" else 0), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("document", IN_PYTHON, ids=lambda path: path.stem)
def test_every_program_of_a_document_runs(document: Path, image: str, place: Path) -> None:
    """Each block is a program of its own, in one workspace, as its owner."""
    command = [str(WRAPPER), "--image", image, "-w", str(place)]
    subprocess.run([*command, "up"], check=True, capture_output=True, timeout=60)
    for block in blocks(document):
        if block.kind == "python":
            done = subprocess.run(
                [*command, "exec", "--", "/opt/branching/bin/python", "-"],
                input=block.text,
                capture_output=True,
                text=True,
                timeout=DOCUMENT_SECONDS,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stderr}"


def test_every_block_has_a_kind_and_every_reference_is_there() -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        assert text.count("\n```") == 2 * len(blocks(document)), f"{document}: a fence without a kind, or not closed"
        for block in blocks(document):
            assert block.kind in RUN + NOT_RUN, f"{document}: what is {block.kind!r}?"
            for name in block.elsewhere:
                assert (ROOT / name).is_file(), f"{document}: {name}"
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document}: {target}"
