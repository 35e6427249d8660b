"""README.md: its shown output is what the commands print, its table names every command, and its
picture is a self-contained recording of the race.
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
from support.branchfs import find_program

from branching.cli.app import app

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
EXAMPLE = REPOSITORY / "examples" / "race"
PICTURE = REPOSITORY / "docs" / "race.svg"
LINES_MAX = 150
PICTURE_BYTES_MAX = 150_000
COMMAND_SECONDS_MAX = 120
SVG = "{http://www.w3.org/2000/svg}"
OUTSIDE = re.compile(r"href|url\(|@import|<script|<image|<foreignObject|\son\w+=")
"""What a picture could load or run."""


def steps() -> list[tuple[str, str]]:
    """Returns each command of the README's sessions, with the output shown for it."""
    sessions = re.findall(r"^```console\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [
        (command, output)
        for session in sessions
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)
    ]


def normal(text: str) -> str:
    """Returns output without what differs from run to run: branch ids and the directory."""
    text = re.sub(r"\b(run|speculate)-[0-9a-f]{8}\b", r"\1-ID", text)
    return re.sub(r"(?<=workspace: ).*", "DIR", text)


def environment() -> dict[str, str]:
    programs = [Path(sys.executable).parent, Path(find_program()).parent]
    return {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "BRANCHFS": str(find_program()),
    }


def test_the_shown_output_is_what_the_commands_print(place: Path) -> None:
    directory = place / "race"
    shutil.copytree(EXAMPLE, directory)
    assert len(steps()) >= 5
    for command, shown in steps():
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
        assert normal(done.stdout) == normal(shown), command


def test_the_table_of_commands_names_every_command_once() -> None:
    section = README.split("\n## Commands\n", 1)[1].split("\nEach command", 1)[0]
    named = re.findall(r"`([a-z-]+)`", section)
    assert sorted(named) == sorted(str(command.name) for command in app.registered_commands)


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
