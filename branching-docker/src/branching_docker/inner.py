"""The commands of `branching` itself, known without an image.

`commands.json` has each command's summary, help and options. `scripts/manual.py` writes it from the definitions of the
commands, and a test compares the two.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TABLE = Path(__file__).with_name("commands.json")
HELP_OPTIONS = ("-h", "--help")


@cache
def commands() -> dict[str, dict[str, Any]]:
    """Returns the table: by name, `summary`, `help`, `options` and `wraps`.

    Each of the `options` has its `names`, its `help` and whether it `takes_value`. `wraps` is whether the arguments are
    a command of the user's, so that the first one ends the options.
    """
    table: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@dataclass(frozen=True)
class Word:
    """An option or argument on a command line."""

    place: slice
    """Its words on the command line, the value included."""
    option: str
    """The option as it was written; empty for an argument."""
    value: str | None


def parse_words(command: str, words: Sequence[str]) -> Iterator[Word]:
    """Yields the options and arguments after a command's name, up to the words of a user's own command.

    Unknown commands and options have no values: the image reports them.
    """
    about = commands().get(command, {"options": [], "wraps": True})
    with_value = {name for option in about["options"] if option["takes_value"] for name in option["names"]}
    place = 0
    while place < len(words):
        word, start = words[place], place
        place += 1
        if word == "--" or not word.startswith("-") or word == "-":
            if about["wraps"]:
                return
            if word == "--":
                yield from (Word(slice(at, at + 1), "", words[at]) for at in range(place, len(words)))
                return
            yield Word(slice(start, place), "", word)
            continue
        option, is_joined, value = split(word, with_value)
        if option in with_value and not is_joined:
            value = words[place] if place < len(words) else None
            place += 1
        yield Word(slice(start, place), option, value if option in with_value else None)


def split(word: str, with_value: set[str]) -> tuple[str, bool, str | None]:
    """Splits `--name=value` and `-nvalue`; returns the option, whether a value is joined to it, and the value."""
    if word.startswith("--"):
        option, joined, value = word.partition("=")
        return option, bool(joined), value
    if word[:2] in with_value and len(word) > 2:
        return word[:2], True, word[2:].removeprefix("=")
    return word, False, None


def wants_help(command: str, words: Sequence[str]) -> bool:
    """Returns whether a known command is asked for its help."""
    return command in commands() and any(word.option in HELP_OPTIONS for word in parse_words(command, words))
