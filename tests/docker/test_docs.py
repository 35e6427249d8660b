"""The documents as a reader follows them: every code block of README.md and docs/ is run, in order, one fresh directory
a document.

    sh          by bash, which stops at the first command that fails; what calls `branching` itself, in a container
    python      by the image's Python, in a branching workspace
    yaml        pipelines and manifests: another test runs or validates them
    console     commands and their output: another test compares them
    text, toml, json    are no code, nor is a block without a kind, a drawing
A block whose run would repeat another test's says which: <!-- tested by: FILE, FILE -->. One that is not run at all
says why: <!-- not run: REASON -->.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from docker.errors import ImageNotFound

from conftest import ROOT, WRAPPER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import docker

DOCUMENT_SECONDS = 1100
pytestmark = pytest.mark.timeout(1200)  # a document is a dozen containers, one after another
FENCE = re.compile(
    r"(?:<!-- (?:tested by: (?P<elsewhere>[^\n]*?)|not run: (?P<reason>[^\n]*?)) -->\n)?"
    r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
RUN = ("sh", "python", "yaml")
NOT_RUN = ("text", "toml", "json", "console", "")
DERIVED = "branching-with-bc"
"""The image that docs/image.md makes."""
INSIDE = "limits.md"
"""Its commands are `branching`'s: they are run in the container."""
OF_OTHERS = {
    "agent-frameworks.md": "tests/python/agent/test_agent_docs.py",
    "agents.md": "tests/python/agent/test_documents.py",
    "agents-quickstart.md": "tests/python/agent/test_agent_docs.py",
    "agents-reference.md": "tests/python/agent/test_agent_docs.py",
    "mcp.md": "tests/python/test_recipes.py",
    "recipes.md": "tests/python/test_recipes.py",
}
"""Documents whose blocks another test runs, all of them."""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    kind: str
    text: str
    elsewhere: tuple[str, ...]
    reason: str

    @property
    def is_run(self) -> bool:
        """Whether it is run here."""
        return not self.elsewhere and not self.reason


def blocks(document: Path) -> list[Block]:
    """Returns the blocks of a document."""
    return [
        Block(
            match["kind"],
            match["text"],
            tuple(match["elsewhere"].split(", ")) if match["elsewhere"] else (),
            match["reason"] or "",
        )
        for match in FENCE.finditer(document.read_text())
    ]


DOCUMENTS = [
    *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in OF_OTHERS),
    *sorted((ROOT / "branchfs" / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "branching-docker" / "README.md",
]


def having(*kinds: str) -> list[Path]:
    """Returns the documents with a block of these kinds that is run here, on the host."""
    return [path for path in DOCUMENTS if any(block.is_run and block.kind in kinds for block in blocks(path))]


SCRIPTED = [path for path in having("sh") if path.name != INSIDE]
IN_PYTHON = having("python")


@pytest.fixture
def place(image: str, engine: docker.DockerClient, tmp_path: Path) -> Iterator[Path]:
    """A directory of user 1000's to follow a document in; whatever containers it leaves warm are ended."""
    root = tmp_path / "reader"
    root.mkdir()
    os.chown(root, 1000, 1000)
    yield root
    for path in (root, *filter(os.path.isdir, root.glob("*"))):
        subprocess.run([WRAPPER, "--image", image, "-w", path, "down"], capture_output=True, timeout=180)
    with suppress(ImageNotFound):
        engine.images.remove(DERIVED)


def script(document: Path, image: str) -> str:
    """Returns what a reader would type, with the image under test in the default's place."""
    lines = []
    for block in blocks(document):
        if block.kind == "sh" and block.is_run:
            lines.append(block.text)
    return re.sub(r"(?<=\s)branching(?= (?:run|--version)|\n)|(?<==)branching(?=[ \n])", image, "\n".join(lines))


@pytest.mark.parametrize("document", SCRIPTED, ids=lambda path: path.stem)
def test_every_command_of_a_document_works(document: Path, image: str, place: Path) -> None:
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
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("document", IN_PYTHON, ids=lambda path: path.stem)
def test_every_program_of_a_document_runs(document: Path, image: str, place: Path) -> None:
    """Each block is a program of its own, in one workspace, as its owner."""
    command = [str(WRAPPER), "--image", image, "-w", str(place)]
    subprocess.run([*command, "up"], check=True, capture_output=True, timeout=180)
    for block in blocks(document):
        if block.kind == "python" and block.is_run:
            done = subprocess.run(
                [*command, "exec", "--", "/opt/branching/bin/python", "-"],
                input=block.text,
                capture_output=True,
                text=True,
                timeout=DOCUMENT_SECONDS,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stderr}"


def test_every_command_for_the_inside_works(image: str, place: Path) -> None:
    """Of a document whose commands are `branching`'s own: by the container's root, as in a container of one's own."""
    (place / "Makefile").write_text("test:\n\t@true\n")
    for name in ("fix-a", "fix-b"):
        (place / name).write_text("#!/bin/sh\ntouch fixed\n")
        (place / name).chmod(0o755)
    command = [str(WRAPPER), "--image", image, "-w", str(place)]
    subprocess.run([*command, "up"], check=True, capture_output=True, timeout=180)
    text = "".join(block.text for block in blocks(ROOT / "docs" / INSIDE) if block.kind == "sh")
    done = subprocess.run(
        [*command, "--root", "exec", "env", "-u", "BRANCHING_ROOT", "bash", "-xeuc", text],
        capture_output=True,
        text=True,
        timeout=DOCUMENT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "fixed").stat().st_uid == place.stat().st_uid


# Where branches can be kept: neither in a branch, nor in the image's own layers.
ELSEWHERE = 'cd "$(mktemp -d -p /dev/shm)" && mkdir project && exec /opt/branching/bin/python -'


def test_the_readmes_program_commits_its_first(image: str, place: Path) -> None:
    """It makes a workspace of its own, as on a host."""
    command = [str(WRAPPER), "--image", image, "-w", str(place)]
    subprocess.run([*command, "up"], check=True, capture_output=True, timeout=180)
    (program,) = (block.text for block in blocks(ROOT / "README.md") if block.kind == "python")
    inside = [*command, "--root", "exec", "sh", "-c", ELSEWHERE]
    done = subprocess.run(inside, input=program, capture_output=True, text=True, timeout=DOCUMENT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "True 0\n"), done.stderr


def normal(output: str, wrapper: str) -> str:
    """Returns output with the wrapper's command as that of the native one, and without ids of branches."""
    return re.sub(r"\b(run|speculate)-[0-9a-f]{8}\b", r"\1-ID", output.replace(wrapper, "branching"))


def test_the_readmes_sessions_print_the_same_through_the_wrapper(image: str, place: Path) -> None:
    """In a copy of examples/race: each command, with the wrapper in the place of `branching`."""
    directory = place / "race"
    shutil.copytree(ROOT / "examples" / "race", directory)
    for path in (directory, *directory.iterdir()):
        os.chown(path, 1000, 1000)
    sessions = "".join(block.text for block in blocks(ROOT / "README.md") if block.kind == "console")
    steps = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", sessions, re.MULTILINE)
    assert len(steps) > 4
    for command, shown in steps:
        words = re.sub(r"^branching ", f"{WRAPPER} --image {image} ", command)
        done = subprocess.run(
            ["sh", "-c", words],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOCUMENT_SECONDS,
        )
        said = f"branching-docker -w {directory}"
        streams = [normal(text, said).splitlines(keepends=True) for text in (done.stdout, done.stderr)]
        # Docker carries the two streams separately: which line of one comes before which of the other is chance.
        for line in normal(shown, said).splitlines(keepends=True):
            stream = next((stream for stream in streams if stream[:1] == [line]), None)
            assert stream is not None, f"{command}: {line!r} is not next in {streams}"
            stream.pop(0)
        assert streams == [[], []], command


def test_nothing_escapes() -> None:
    """Each block has a kind, is run here or says where or why not, and each reference is there."""
    for name, test in OF_OTHERS.items():
        assert f'"{name}"' in (ROOT / test).read_text()
    for document in DOCUMENTS:
        text = document.read_text()
        assert text.count("\n```") == 2 * len(blocks(document)), f"{document}: a fence without a kind, or not closed"
        for block in blocks(document):
            assert block.kind in RUN + NOT_RUN, f"{document}: what is {block.kind!r}?"
            assert block.kind != "console" or block.elsewhere, f"{document}: which test compares that output?"
            if block.reason:
                assert len(block.reason) > 20, f"{document}: why is that not run?"
            for name in block.elsewhere:
                assert (ROOT / name).is_file(), f"{document}: {name}"
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (document.parent / target).exists(), f"{document}: {target}"
