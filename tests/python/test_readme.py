"""README.md: its shown output is what the commands print, its table names every command, its
picture is a self-contained recording of the race. docs/environment.md
names every variable.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from branching_docker.settings import LISTS, NAMES
from support.branchfs import find_program
from typer.testing import CliRunner

from branching.cli.app import app

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
EXAMPLE = REPOSITORY / "examples" / "race"
PICTURE = REPOSITORY / "docs" / "race.svg"
SHOWN_DIRECTORY = "/tmp/race"
LINES_MAX = 150
PICTURE_BYTES_MAX = 150_000
COMMAND_SECONDS_MAX = 120
SVG = "{http://www.w3.org/2000/svg}"
OUTSIDE = re.compile(r"href|url\(|@import|<script|<image|<foreignObject|\son\w+=")
"""What a picture could load or run."""


def steps(document: str) -> list[tuple[str, str]]:
    """Returns each command of a document's sessions, with the output shown for it."""
    text = (REPOSITORY / document).read_text()
    sessions = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [
        (command, output)
        for session in sessions
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    ]


def normal(text: str) -> str:
    """Returns output without the ids of branches."""
    return re.sub(r"\b(run|speculate)-[0-9a-f]{8}\b", r"\1-ID", text)


def environment() -> dict[str, str]:
    programs = [Path(sys.executable).parent, Path(find_program()).parent]
    return {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "BRANCHFS": str(find_program()),
    }


@pytest.mark.contract("7.11")
@pytest.mark.parametrize("document", ["README.md", "docs/environment.md", "docs/uninstall.md"])
def test_the_shown_output_matches_the_commands(document: str, place: Path) -> None:
    directory = place / "race"
    shutil.copytree(EXAMPLE, directory)
    assert steps(document)
    for command, shown in steps(document):
        done = subprocess.run(
            ["sh", "-c", command],
            check=False,
            cwd=directory,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS_MAX,
        )
        assert normal(done.stdout) == normal(shown.replace(SHOWN_DIRECTORY, str(directory))), (
            command
        )


def command_groups() -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for command in app.registered_commands:
        groups.setdefault(str(command.rich_help_panel), []).append(str(command.name))
    return groups


def test_the_table_of_commands_has_the_groups_of_the_help() -> None:
    section = README.split("\n## Commands\n", 1)[1].split("\nEach command", 1)[0]
    rows = re.findall(r"^\| ([A-Z][\w ]+) \| (.*) \|$", section, re.MULTILINE)
    groups = {title: re.findall(r"`([a-z-]+)`", cell) for title, cell in rows}
    assert groups == command_groups()


def test_the_help_lists_every_command_in_its_group() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    listed: dict[str, list[str]] = {}
    title = ""
    for line in shown.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line[:-1]
        elif name := re.match(r"  ([a-z-]+) {2,}", line):
            listed.setdefault(title, []).append(name[1])
    listed.pop("Options", None)
    assert listed == command_groups()


def test_the_readme_is_short_and_begins_with_its_two_commands() -> None:
    assert len(README.splitlines()) <= LINES_MAX
    first = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[0]
    assert [line.split()[0] for line in first.splitlines()] == ["scripts/demo", "scripts/test"]


def final_screen(picture: Path) -> list[str]:
    """Returns the lines that a picture ends with, without ids, times and blanks."""
    groups = ElementTree.parse(picture).getroot().findall(f"{SVG}g[@class='last']")
    lines = [" ".join("".join(text.itertext()) for text in group) for group in groups]
    return [re.sub(r"\d+\.\d+s\b", "TIME", normal(" ".join(line.split()))) for line in lines]


def test_the_picture_is_described_and_loads_nothing() -> None:
    text = PICTURE.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "title description"
    assert {root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")}.isdisjoint({None, ""})
    assert OUTSIDE.findall(text) == []
    assert len(text) < PICTURE_BYTES_MAX
    style = root.findtext(f"{SVG}style") or ""
    assert "prefers-color-scheme:dark" in style
    assert "prefers-reduced-motion:reduce" in style
    animated = {str(group.get("style")).split(":")[1] for group in root.iter(f"{SVG}g")}
    assert animated == set(re.findall(r"@keyframes (\w+)", style))
    assert re.search(r"!\[[^\]]{40,}\]\(docs/race\.svg\)", README)


def test_the_picture_shows_a_race() -> None:
    past = {text.text for text in ElementTree.parse(PICTURE).getroot().iter(f"{SVG}text")}
    assert {"running", "failed", "won", "cancelled"} <= past


@pytest.mark.slow
def test_a_new_recording_ends_like_the_picture(place: Path) -> None:
    recorded = place / "race.svg"
    subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "record.py", "--output", recorded],
        env=environment(),
        check=True,
        timeout=COMMAND_SECONDS_MAX,
    )
    assert final_screen(recorded) == final_screen(PICTURE)
    assert len(final_screen(recorded)) > 10


ENVIRONMENT = (REPOSITORY / "docs" / "environment.md").read_text()
VARIABLE = re.compile(r"\bBRANCH(?:ING|FS)_[A-Z_]*[A-Z]\b")
TEST_VARIABLES = {"BRANCHFS_SEED", "BRANCHFS_SOAK"}
"""Read by tests of BranchFS that stand among its sources."""


def variables_of_source() -> set[str]:
    roots = [
        ("branching", "*.py"),
        ("branchfs/src", "*.rs"),
        ("branchfs/crates/core/src", "*.rs"),
        ("branching-docker/src", "*.py"),
    ]
    files = [file for root, kind in roots for file in (REPOSITORY / root).rglob(kind)]
    files += [file for file in (REPOSITORY / "docker").iterdir() if file.is_file()]
    return {name for file in files for name in VARIABLE.findall(file.read_text())} - TEST_VARIABLES


def test_the_page_of_variables_names_each_of_the_source() -> None:
    assert len(variables_of_source()) > 30
    assert sorted(variables_of_source() - set(VARIABLE.findall(ENVIRONMENT))) == []


def test_the_page_of_variables_names_no_other() -> None:
    wrapper = ENVIRONMENT.split("\n## Read by `branching-docker`\n", 1)[1].split("\n## ", 1)[0]
    options = {f"BRANCHING_{name.upper()}" for name in NAMES if name not in LISTS}
    assert set(VARIABLE.findall(wrapper)) == options
    named = set(VARIABLE.findall(ENVIRONMENT))
    assert sorted(named - options - variables_of_source()) == []
