"""`--report` and `branching log --html`: a page that compares the candidates of a call."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.command import branching

from branching.cli.html_report import OUTPUT_BYTES_MAX
from branching.cli.side_by_side import file_diffs

CHROMIUM = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu"]
RACE = ["speculate", "-q", "-c", f"echo lost >>{NAME_FROM}; exit 1", "-c", "sleep 0.3; echo won >a"]
PHONE, DESK = 390, 1200
"""Widths of windows, in CSS pixels."""
MEASURE = """<script>
const top_of = side => document.querySelector(`.diff .changed .${side}`).getBoundingClientRect().top
document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth
document.body.dataset.beside = top_of("left") == top_of("right")
</script></body>"""
VOID = {"br", "meta"}
"""Elements without an end."""


class Page(HTMLParser):
    """The page: texts by element, and whether its elements are nested as they must be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: dict[str, list[str]] = {}
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for _, value in attrs:
            assert "http:" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data


def page_of(mounted: Mounted, *words: str) -> Page:
    done = branching(mounted.root, "log", "--html", *words)
    assert (done.code, done.err) == (0, "")
    return Page(done.out)


def tree_of(page: str) -> list[tuple[int, str]]:
    """Returns level and number of each candidate in the tree of a page."""
    level, found = 0, []
    for tag, number in re.findall(r"<(/?ul|li)[^>]*>(?:<span[^>]*>(\d+): )?", page):
        level += {"ul": 1, "/ul": -1}.get(tag, 0)
        found += [(level, number)] if tag == "li" else []
    return found


def test_the_page_shows_what_the_winner_and_the_losers_did(real: Mounted) -> None:
    loser = f"echo lost >> {NAME_FROM}; echo 'I lost'; exit 1"
    done = branching(real.root, "speculate", "-q", "-c", loser, "-c", "sleep 0.3; echo won > new")
    assert done.code == 0, done.err
    page = page_of(real)
    assert "2 candidates" in page.texts["p"][0]
    assert "Committed: 1: sleep 0.3; echo won > new." in page.texts["p"][1]
    assert "branching undo" in page.texts["code"]
    [head, first, second] = page.texts["tr"][:3]
    assert head == "#candidatestatetimeCPUmemorychanges"
    assert "failed" in first
    assert "won" in second
    lost, won = page.texts["section"]
    assert "lost" in lost
    assert "won" in won
    assert any("I lost" in text for text in page.texts["details"])


def test_the_page_of_one_branch_and_of_an_earlier_call_can_be_had(real: Mounted) -> None:
    branching(real.root, "speculate", "-q", "-c", "echo a > a; exit 1", "-c", "exit 1")
    call = branching(real.root, "log").out.split()[0].rpartition("-")[0]
    branching(real.root, "speculate", "-q", "-c", "echo b > b")
    assert "1 candidate " in page_of(real).texts["p"][0]
    assert "Nothing was committed." in page_of(real, call).texts["p"][1]
    only = page_of(real, f"{call}-1")
    assert len(only.texts["section"]) == 1
    assert "No patch was saved." in only.texts["section"][0]


def test_output_of_candidates_is_never_markup(real: Mounted) -> None:
    script = "<script>alert(1)</script>"
    command = f"printf '\\033[31m{script}\\033[0m\\a\\n' | tee '<b>&name'; exit 1"
    branching(real.root, "speculate", "-q", "-c", command)
    page = page_of(real)
    assert "script" not in page.tags
    assert page.texts["b"] == ["<b>&name"]  # as text in an element of the page's own
    assert script in page.texts["details"][0]
    assert "^G" in page.texts["details"][0]
    assert f"^[[31m{script}" not in page.texts["section"][0]
    assert script in page.texts["section"][0]


def test_of_a_long_output_the_page_has_the_end(real: Mounted) -> None:
    branching(real.root, "speculate", "-q", "-c", "seq 30000; exit 1")
    [output] = page_of(real).texts["details"]
    assert "bytes are left out]" in output
    assert output.endswith("\n30000")
    assert len(output) < OUTPUT_BYTES_MAX + 1000


def test_the_page_excludes_other_forms_and_needs_a_call(real: Mounted) -> None:
    for other in ("--patch", "--json"):
        done = branching(real.root, "log", "--html", other, "x")
        assert done.code == 2
        assert "--html cannot be combined with" in done.err + done.out
    done = branching(real.root, "log", "--html")
    assert done.code == 2
    assert "nothing has run yet" in done.err


def test_a_call_writes_its_report_also_when_nothing_succeeds(real: Mounted, tmp_path: Path) -> None:
    file = tmp_path / "race.html"
    file.write_text("of an earlier call")
    assert branching(real.root, *RACE, "--report", str(file)).code == 0
    assert Page(file.read_text()).texts["section"][1].startswith("1: sleep 0.3; echo won >a")
    done = branching(real.root, "speculate", "-q", "-c", "exit 3", "--report", str(file))
    assert done.code == 1
    assert "Nothing was committed." in Page(file.read_text()).texts["p"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["race.html"]


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(
    real: Mounted, tmp_path: Path
) -> None:
    for place, why in ((tmp_path, "is not a file"), (tmp_path / "no" / "r.html", "no file can be")):
        done = branching(real.root, *RACE, "--report", str(place))
        assert (done.code, why in done.err) == (2, True), done.err
        assert not (real.base / "a").exists()
    done = branching(
        real.root, *RACE, "--report", "r.html", BRANCHING_HOST_WORKSPACE="/home/me/project"
    )
    assert done.code == 2
    assert "log --html prints the same page" in done.err


def test_the_report_of_a_fork_has_its_resources(real: Mounted, tmp_path: Path) -> None:
    file = tmp_path / "fork.html"
    command = "head -c 1000 /dev/zero >f; echo said"
    done = branching(real.root, "fork", "-q", "--report", str(file), "-c", command, "-c", "exit 1")
    assert done.code == 0, done.err
    page = Page(file.read_text())
    assert re.search(r"won.*[\d.]+ s.*[\d.]+ MiB", page.texts["tr"][1])
    assert "said" in page.texts["pre"]


def test_the_tree_of_a_search_by_levels_and_of_a_tournament(real: Mounted, tmp_path: Path) -> None:
    file = tmp_path / "tree.html"
    expand = "echo 'echo 0.9 >&3; echo x >deep'"
    for search in ("beam-search", "tree-of-thoughts"):
        words = [search, "-q", "-c", "echo 0.1 >&3", "-c", "echo 0.5 >&3", "--expand", expand]
        words += ["--beam-width", "1"] * (search == "beam-search")
        assert branching(real.root, *words, "--max-depth", "2", "--report", str(file)).code == 0
        assert tree_of(file.read_text()) == [(1, "0"), (1, "1"), (2, "2")]
    words = ["tournament", "-q", "-n", "4", "--judge", "echo b", "--report", str(file)]
    assert branching(real.root, *words, "--", "sh", "-c", "echo $BRANCHING_ATTEMPT >f").code == 0
    assert tree_of(file.read_text()) == [(1, "3"), (2, "1"), (3, "0"), (2, "2")]


def test_a_patch_is_read_as_pairs_of_lines() -> None:
    patch = (
        "diff --git a/x b/x\nnew mode 100755\nindex 1..2\n--- a/x\n+++ b/x\n"
        "@@ -3,4 +3,3 @@ f()\n same\n-- one\n-two\n+1\n last\n"
        "\\ No newline at end of file\n@@ -90 +89,2 @@\n-x\n+y\n+--- z\n"
        "# y: the owner changed\n"
    )
    x, other = file_diffs(patch)
    assert (x.name, x.notes, x.added, x.deleted) == ("x", ["new mode 100755"], 3, 3)
    assert [(row.kind, row.old, row.new) for row in x.rows] == [
        ("same", (3, "same"), (3, "same")),
        ("changed", (4, "- one"), (4, "1")),
        ("changed", (5, "two"), None),
        ("same", (6, "last"), (5, "last")),
        ("gap", None, None),
        ("changed", (90, "x"), (89, "y")),
        ("changed", None, (90, "--- z")),
    ]
    assert (other.name, other.notes) == ("", ["# y: the owner changed"])


@pytest.mark.parametrize(("width", "is_beside"), [(DESK, "true"), (PHONE, "false")])
def test_the_page_fits_a_window_of_a_desk_and_of_a_phone(
    real: Mounted, tmp_path: Path, width: int, is_beside: str
) -> None:
    """Measured by a script in Chromium; the page itself allows no script."""
    file = tmp_path / "race.html"
    long = f"sed -i s/seed/{'long' * 60}/ {NAME_FROM}; echo {'word' * 90}"
    assert branching(real.root, "speculate", "-q", "-c", long, "--report", str(file)).code == 0
    page = file.read_text()
    shown = subprocess.run(
        [*CHROMIUM, "--enable-logging=stderr", "--dump-dom", f"file://{file}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Content Security Policy" not in shown.stderr  # all styles are allowed by it
    file.write_text(re.sub("<meta http-equiv.*", "", page).replace("</body>", MEASURE))
    measured = subprocess.run(
        [*CHROMIUM, f"--window-size={width},900", "--dump-dom", f"file://{file}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    [body] = re.findall("<body.*", measured)
    assert body == f'<body data-wide="false" data-beside="{is_beside}">'


def test_in_print_a_long_output_is_whole(real: Mounted, tmp_path: Path) -> None:
    """On the screen it scrolls in a frame: with that it would be on two pages."""
    file, pdf = tmp_path / "race.html", tmp_path / "race.pdf"
    words = ["speculate", "-q", "-c", "seq 1000; exit 1", "--report", str(file)]
    assert branching(real.root, *words).code == 1
    print_it = [*CHROMIUM, f"--print-to-pdf={pdf}", f"file://{file}"]
    subprocess.run(print_it, capture_output=True, check=True)
    assert len(re.findall(rb"/Type ?/Page\b", pdf.read_bytes())) > 8
