"""The parts of `watch` without a screen: rendering, comparison, tails of output, requests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from branching._threads import WAITING_MAX, QueueThread
from branching.tui.chat.app import Tab, chips_text
from branching.tui.diff.diff_view import row_text
from branching.tui.diff.line_diff import LINES_MAX, compare
from branching.tui.diff.syntax import syntax_colours
from branching.tui.formatting import coloured, duration, filled, money, plain, shortened, turns_text
from branching.tui.watch import workspace_monitor
from branching.tui.watch.workspace_monitor import OUTPUT_BYTES_MAX, OUTPUT_LINES_MAX, Tail


class TestLooks:
    @pytest.mark.parametrize(
        ("text", "harmless"),
        [
            ("plain", "plain"),
            ("\x1b[31mred\x1b[0m", "red"),
            ("a\x1b[2Jb", "ab"),
            ("a\x1b]0;title\x07b", "ab"),
            ("a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
            ("a\x1bPsixel\x1b\\b", "ab"),
            ("two\nlines", "two lines"),
            ("bell\x07 back\x08 \x9b2J", "bell back 2J"),
            ("right\u202eleft", "rightleft"),
            ("cut \x1b[3", "cut 3"),
            ("no \udcff UTF-8", "no \ufffd UTF-8"),
        ],
    )
    def test_nothing_a_terminal_would_obey_is_left(self, text: str, harmless: str) -> None:
        assert plain(text) == harmless

    def test_of_output_the_colours_stay_and_of_a_progress_bar_the_last_state(self) -> None:
        assert coloured("\x1b[1;31mred\x1b[0m\x1b[2K") == "\x1b[1;31mred\x1b[0m"
        assert coloured("10%\r50%\r100%\r") == "100%"

    def test_a_long_name_is_shortened_in_the_middle(self) -> None:
        assert shortened("speculate-1a2b3c4d-0", 12) == "specu…3c4d-0"
        assert shortened("short", 12) == "short"

    def test_a_wide_character_has_two_cells(self) -> None:
        assert cell_len(shortened("分支" * 10, 12)) == 12
        assert [filled(text, 6) for text in ("分支", "分支分支", "ab", "abcdefg")] == [
            "分支  ",
            "分支 …",
            "ab    ",
            "abcde…",
        ]

    def test_times_and_money(self) -> None:
        assert [duration(s) for s in (7.06, 125, 3725)] == ["7.1s", "2m05s", "1h02m"]
        assert [money(m) for m in (None, 0, 0.0021, 1.5)] == ["", "$0.00", "$0.0021", "$1.50"]


class TestComparison:
    def test_hunks_have_context_and_numbers(self) -> None:
        left = "".join(f"{n}\n" for n in range(1, 31)).encode()
        right = left.replace(b"\n5\n", b"\nfive\n").replace(b"\n25\n", b"\n25\nmore\n")
        found = compare("f", left, right)
        assert len(found.hunks) == 2
        changed = [row for row in found.rows if row.kind in ("changed", "added")]
        assert [(row.left, row.right) for row in changed] == [("5", "five"), (None, "more")]
        assert [(row.left_number, row.right_number) for row in changed] == [(5, 5), (None, 26)]
        assert found.rows[1].left == "2"  # three lines around it

    @pytest.mark.parametrize(
        ("left", "right", "note"),
        [
            (b"\0", b"x", "binary"),
            (None, b"\0", "absent"),
            (b"x", b"x", "same content"),
            (None, None, "neither"),
            ("[a link]", b"x", "a link"),
            (b"x\n" * (LINES_MAX + 1), b"x", "long"),
            (None, b"", "no lines"),
        ],
    )
    def test_a_file_without_lines_has_a_note_instead(
        self, left: bytes | str | None, right: bytes | str | None, note: str
    ) -> None:
        found = compare("f", left, right)
        assert note in found.note
        assert not found.rows

    def test_a_new_file_is_all_added(self) -> None:
        assert [row.kind for row in compare("f", None, b"a\nb\n").rows] == [
            "hunk",
            "added",
            "added",
        ]


def test_columns_are_columns_whatever_the_characters() -> None:
    found = compare("f", "分支分支分支分支\nshort\n".encode(), "short\tx\n分支\n".encode())
    lines = [row_text(row, 40).plain for row in found.rows]
    assert {cell_len(line) for line in lines} <= {39, 40}
    assert len({cell_len(line[: line.index(" ~ ")]) for line in lines if " ~ " in line}) == 1


def styles_of(text: Text, word: str) -> str:
    """The styles of the first character of a word, as text."""
    place = text.plain.index(word)
    return " ".join(str(span.style) for span in text.spans if span.start <= place < span.end)


class TestSyntaxColours:
    def test_code_is_coloured_and_the_sign_has_the_colour_of_the_change(self) -> None:
        found = compare("f.py", b"def f():\n    pass\n", b"def f():\n    return 'text'\n")
        colours = syntax_colours(found)
        assert len(colours) == len(found.rows) == 3
        hunk, same, changed = (
            row_text(row, 60, *sides) for row, sides in zip(found.rows, colours, strict=True)
        )
        assert [each.plain for each in (hunk, same, changed)] == [
            row_text(row, 60).plain for row in found.rows
        ]
        keyword, string = styles_of(changed, "return"), styles_of(changed, "'text'")
        assert keyword
        assert string
        assert keyword != string
        assert styles_of(same, "def") == keyword
        assert styles_of(changed, " ~ ") == "yellow"
        assert styles_of(changed, "2 ") == "yellow"
        assert "yellow" not in keyword

    def test_a_text_of_several_lines_is_one_where_it_begins_in_the_hunk(self) -> None:
        before = b"x = 1\n" * 20
        found = compare("f.py", before, before + b'"""begin\nreturn\n"""\n')
        shown = [
            row_text(row, 60, *sides)
            for row, sides in zip(found.rows, syntax_colours(found), strict=True)
        ]
        [begin, inside] = [
            styles_of(text, word)
            for text in shown
            for word in ("begin", "return")
            if word in text.plain
        ]
        assert begin == inside
        assert begin != "green", "the colour of the change alone"

    def test_controls_cut_lines_and_unknown_files_look_as_without_colours(self) -> None:
        after = "a\x1b[31m\tb\n" + "分支" * 40 + "\n" + "y" * 2000 + "\n\n\n1\n"
        for name in ("f.py", "f.unknown", "Makefile"):
            found = compare(name, b"1\n", after.encode())
            for row, sides in zip(found.rows, syntax_colours(found), strict=True):
                assert row_text(row, 40, *sides).plain == row_text(row, 40).plain


class TestTail:
    def test_lines_come_whole_and_once(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        tail = Tail("b", log)
        missing = tail.read()
        assert missing is not None
        assert not missing.is_kept
        assert tail.read() is None
        log.write_bytes(b"one\ntw")
        first = tail.read()
        assert first is not None
        assert (first.is_first, first.lines) == (True, ("one",))
        with log.open("ab") as file:
            file.write(b"o\n\xc3")
        second = tail.read()
        assert second is not None
        assert (second.is_first, second.lines) == (False, ("two",))
        assert tail.read() is None

    def test_only_the_end_of_a_long_log_is_read_with_a_note(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_bytes(b"x" * 99 + b"\n" + b"y" * (OUTPUT_BYTES_MAX - 4) + b"\nend\n")
        found = Tail("b", log).read()
        assert found is not None
        assert "left out" in found.lines[0]
        assert found.lines[-1] == "end"

    def test_of_many_lines_at_once_the_last_are_shown_with_a_note(self, tmp_path: Path) -> None:
        """Drawing thousands of lines twice a second would leave no time for keys."""
        log = tmp_path / "log"
        log.write_bytes(b"y\n" * (OUTPUT_BYTES_MAX // 2 - 10) + b"end\n")
        found = Tail("b", log).read()
        assert found is not None
        assert len(found.lines) == OUTPUT_LINES_MAX
        assert "left out" in found.lines[0]
        assert found.lines[-1] == "end"

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret\n")
        (tmp_path / "log").symlink_to(tmp_path / "secret")
        found = Tail("b", tmp_path / "log").read()
        assert found is not None
        assert (found.is_kept, found.lines) == (False, ())


class TestQueueThread:
    def test_values_and_errors_come_back_in_order(self) -> None:
        async def run() -> None:
            background = QueueThread("test", WAITING_MAX)
            values = await asyncio.gather(*(background.do(abs, -n) for n in range(3)))
            assert values == [0, 1, 2]
            with pytest.raises(ZeroDivisionError):
                await background.do(lambda: 1 / 0)

        asyncio.run(run())

    def test_one_that_hangs_does_not_hold_up_the_loop_nor_its_end(self) -> None:
        goes_on, begun = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            goes_on.wait()

        async def run() -> None:
            background = QueueThread("test", WAITING_MAX)
            hanging = asyncio.ensure_future(background.do(hang))
            while not begun.is_set():
                await asyncio.sleep(0)
            waiting = [asyncio.ensure_future(background.do(int)) for _ in range(WAITING_MAX)]
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="are queued already"):
                await background.do(int)
            for future in (hanging, *waiting):
                future.cancel()

        asyncio.run(run())  # returns although it hangs
        goes_on.set()


def test_the_chosen_chip_is_always_in_sight() -> None:
    tabs = [Tab(f"branch-{n}", "running") for n in range(20)]
    for chosen in range(20):
        text = chips_text(tabs, chosen, 40).plain
        assert f" branch-{chosen} " in text[:40], chosen


def test_turns_are_counted() -> None:
    assert [turns_text(count) for count in (0, 1, 2)] == ["0 turns", "1 turn", "2 turns"]


def test_limits_have_the_sizes_that_the_documents_say() -> None:
    assert workspace_monitor.LOOK_SECONDS == 0.5
    assert OUTPUT_BYTES_MAX == 65536
