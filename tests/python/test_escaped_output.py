"""Control sequences in the output of a program are escaped when it is shown on a terminal."""

from __future__ import annotations

import pytest
from conftest import Mounted
from support.command import OnTerminal, branching

from branching._sanitize import visible


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext é ✓", "plain\ttext é ✓"),
        ("\x1b[31mred", "\x1b[31mred\x1b[0m"),
        ("\x1b[1;38:5:3mx\x1b[0m", "\x1b[1;38:5:3mx\x1b[0m\x1b[0m"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("\x1b[2J\x1b[H", "^[[2J^[[H"),
        ("a\rb\x00\x7f", "a^Mb^@^?"),
        ("\x9b2J", "\\x9b2J"),
        ("\u202eabc", "\\u202eabc"),
    ],
)
def test_colours_are_sent_and_all_else_is_shown(
    line: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert visible(line) == shown


def test_no_color_takes_the_colours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert visible("\x1b[31mred\x1b[0m \x1b[2J") == "red ^[[2J"


def test_a_log_is_shown_on_a_terminal_and_raw_in_a_pipe(real: Mounted) -> None:
    script = r"printf '\033]0;title\007\033[32mgreen\n\014rest'"
    made = branching(real.root, "speculate", "--json", "-c", script).document
    name = made["results"][0]["branch"]
    raw = branching(real.root, "log", name).out
    assert raw == "\x1b]0;title\x07\x1b[32mgreen\n\x0crest\n"
    shown = OnTerminal(real.root, ["log", "--no-pager", name]).done().out
    assert "^[]0;title^G\x1b[32mgreen\x1b[0m\n^Lrest\n" in shown
    assert "\x07" not in shown


def test_names_of_any_bytes_are_printed(real: Mounted) -> None:
    """Also where standard output knows few characters; bytes outside UTF-8 as they are, else."""
    script = r"touch n$(printf '\303\251') x$(printf '\377')"
    for encoding, mark in (("ascii", "ok:"), ("utf-8", "✓")):
        done = branching(
            real.root, "run", "-v", "--", "sh", "-c", script, PYTHONIOENCODING=encoding
        )
        assert done.code == 0, done.err
        assert f"{mark} committed 2 paths (+2)" in done.err
        for path in real.root.glob("[nx]*"):
            path.unlink()


def test_a_label_that_the_encoding_lacks_is_escaped(real: Mounted) -> None:
    done = branching(real.root, "speculate", "-c", ": ✓", PYTHONIOENCODING="ascii")
    assert (done.code, done.out) == (0, "  [0] ok: : \\u2713\n"), done.err
