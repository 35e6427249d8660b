"""`branching log --html` prints a page that compares the candidates of a call."""

from __future__ import annotations

from html.parser import HTMLParser

from conftest import NAME_FROM, Mounted
from support.command import branching

from branching.cli.html_report import OUTPUT_BYTES_MAX

VOID = {"meta"}
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


def test_the_page_shows_what_the_winner_and_the_losers_did(real: Mounted) -> None:
    loser = f"echo lost >> {NAME_FROM}; echo 'I lost'; exit 1"
    done = branching(real.root, "speculate", "-q", "-c", loser, "-c", "sleep 0.3; echo won > new")
    assert done.code == 0, done.err
    page = page_of(real)
    assert "2 candidates. Committed: sleep 0.3; echo won > new." in page.texts["p"][0]
    assert "branching undo" in page.texts["code"]
    [head, first, second] = page.texts["tr"]
    assert head.startswith("#candidatestate")
    assert "failed" in first
    assert "won" in second
    lost, won = page.texts["section"]
    assert "+lost" in lost
    assert "+won" in won
    assert any("I lost" in text for text in page.texts["details"])


def test_the_page_of_one_branch_and_of_an_earlier_call_can_be_had(real: Mounted) -> None:
    branching(real.root, "speculate", "-q", "-c", "echo a > a; exit 1", "-c", "exit 1")
    call = branching(real.root, "log").out.split()[0].rpartition("-")[0]
    branching(real.root, "speculate", "-q", "-c", "echo b > b")
    assert "1 candidate." in page_of(real).texts["p"][0]
    assert "None was committed." in page_of(real, call).texts["p"][0]
    only = page_of(real, f"{call}-1")
    assert len(only.texts["section"]) == 1
    assert "No patch is kept." in only.texts["section"][0]


def test_what_candidates_wrote_is_text_and_never_markup(real: Mounted) -> None:
    script = "<script>alert(1)</script>"
    command = f"printf '\\033[31m{script}\\033[0m\\a\\n' | tee '<b>&name'; exit 1"
    branching(real.root, "speculate", "-q", "-c", command)
    page = page_of(real)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert script in page.texts["details"][0]
    assert "^G" in page.texts["details"][0]
    assert f"+^[[31m{script}" not in page.texts["section"][0]
    assert f"+{script}" in page.texts["section"][0]


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
        assert "--html goes with neither" in done.err + done.out
    done = branching(real.root, "log", "--html")
    assert done.code == 2
    assert "nothing has run yet" in done.err
