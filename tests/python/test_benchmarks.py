"""The benchmark's arithmetic, and that the whole of it runs. No figure is judged here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

import pytest
from support.branchfs import find_program

from benchmarks import attempts, headline
from benchmarks import session as session_benchmark
from benchmarks.__main__ import main
from benchmarks.cluster import Costs, simulate
from benchmarks.field.contestant import Cannot, Contestant
from benchmarks.field.figures import Spread, TooFewRuns, ratios
from benchmarks.field.page import BEGIN, END, NoPlace, figures, fill
from benchmarks.field.picture import bars
from benchmarks.field.race import Result, Turn, Workload, race
from benchmarks.field.report import document, machine, table
from benchmarks.field.sizes import TINY, Size

REPOSITORY = Path(__file__).parents[2]


def test_a_spread_is_least_median_and_most_of_its_runs() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(1.0, 2.5, 10.0, 4)
    with pytest.raises(ValueError, match="no runs"):
        Spread.of([])


def test_ratios_are_taken_run_by_run() -> None:
    """The disk was ten times slower in the second run, for both: no ratio may show it."""
    assert ratios([2.0, 20.0, 9.0], [1.0, 10.0, 3.0]) == Spread(2.0, 2.0, 3.0, 3)


def test_of_one_run_there_is_no_ratio() -> None:
    with pytest.raises(TooFewRuns, match="takes 2 runs"):
        ratios([2.0], [1.0])
    with pytest.raises(SystemExit) as refused:
        main(["--mode", "tiny", "--runs", "1"])
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("samples", "native"), [([1.0, 2.0], [1.0, 2.0, 3.0]), ([1.0, 2.0], [1.0, 0.0])]
)
def test_runs_that_do_not_compare_give_no_ratio(samples: list[float], native: list[float]) -> None:
    with pytest.raises(ValueError, match=r"compared"):
        ratios(samples, native)


class _Fixed(Contestant):
    """A contestant without branches: what it does is what a test says."""

    def __init__(self, name: str, *, fails_in_run: int | None = None) -> None:
        self.name = name
        self.turns = 0
        self.ended = 0
        self._fails_in_run = fails_in_run

    def end(self) -> None:
        self.ended += 1

    def work(self) -> None:
        self.turns += 1
        if self.turns == self._fails_in_run:
            raise Cannot("it is tired")


@pytest.fixture
def raced(scratch: Path) -> Callable[..., tuple[Result, dict[str, object]]]:
    """Races contestants over one workload: two rows of 1, 2, … seconds, native half of that."""

    def run(*contestants: _Fixed, size: Size = TINY) -> tuple[Result, dict[str, object]]:
        def work(turn: Turn) -> None:
            one = turn.contestant
            assert isinstance(one, _Fixed)
            seconds = float(one.turns + 1)
            turn.record("early", seconds / 2 if turn.native else seconds, "s")
            turn.row = "late"
            one.work()
            turn.record("late", seconds / 4 if turn.native else seconds, "s")

        workload = Workload(name="work", base=lambda *_: None, work=work, pinned=False)
        result = race([workload], list(contestants), size, scratch, lambda _: None)
        about = machine(scratch)
        return result, document(result, [one.name for one in contestants], size, about)

    return run


def test_a_race_compares_everybody_with_native(
    raced: Callable[..., tuple[Result, dict[str, object]]], scratch: Path
) -> None:
    other = _Fixed("other")
    result, data = raced(_Fixed("native"), other)
    assert result.samples["early", "other"] == [1.0, 2.0]
    assert other.ended == TINY.runs
    assert "| early | other | 1 s | 1.5 s | 2 s | 2.00 (2.00 to 2.00) |" in table(data)
    assert "| late | other | 1 s | 1.5 s | 2 s | 4.00 (4.00 to 4.00) |" in table(data)
    assert list(scratch.iterdir()) == []
    labels = [text.text for text in ElementTree.fromstring(bars(data)).iter() if text.text]
    assert {"early", "late", "other", "2", "4"} <= set(labels)


def test_a_failed_contestant_has_a_reason_instead_of_a_figure(
    raced: Callable[..., tuple[Result, dict[str, object]]],
) -> None:
    tired = _Fixed("other", fails_in_run=2)
    _, data = raced(_Fixed("native"), tired)
    assert tired.ended == TINY.runs
    assert "| early | other |" in table(data)
    assert "| late | other |" not in table(data)
    assert "- no figure of other: it is tired (late)" in table(data)


@pytest.mark.parametrize(("minutes", "made"), [(0.0, 2), (60.0, 5)])
def test_no_further_run_begins_when_the_time_is_up_but_there_are_two(
    raced: Callable[..., tuple[Result, dict[str, object]]], minutes: float, made: int
) -> None:
    other = _Fixed("other")
    _, data = raced(_Fixed("native"), other, size=replace(TINY, runs=5, minutes=minutes))
    assert other.ended == made
    assert f"{made} runs, not pinned." in table(data)
    assert "| early | other | 1 s |" in table(data)
    assert f", {made} runs of each" in figures(data)


def _measured(*found: tuple[str, str, float, float | None]) -> dict[str, object]:
    """Returns a document of rows: name, contestant, median in seconds, ratio to native."""
    rows = []
    for row, contestant, median, ratio in found:
        samples = {"minimum": median, "median": median, "maximum": median}
        figure: dict[str, object] = {"row": row, "contestant": contestant, "unit": "s", **samples}
        if ratio is not None:
            figure["ratio"] = {"minimum": ratio, "median": ratio, "maximum": ratio}
        rows.append(figure)
    empty: dict[str, object] = {"not_run": None, "refused": {}, "fuse_requests": {}}
    workload = {"name": "work", "pinned": True, "runs": 2, "figures": rows, **empty}
    about = machine(Path("/"))
    return {"mode": "tiny", "machine": about, "workloads": [workload]}


def test_a_goal_that_is_missed_is_marked_and_so_is_a_peer_that_is_ahead() -> None:
    said = figures(
        _measured(
            ("walk, warm", "ours, overlay", 1.31, 1.31),
            ("walk, warm", "ours, fuse", 1.2, 1.2),
            ("walk, warm", "fuse-overlayfs", 1.25, 1.25),
            ("drop 100 files of 4 KiB", "ours, overlay", 0.0011, None),
            ("drop 100 files of 4 KiB", "ours, fuse", 0.0009, None),
            ("one byte in 1024 MiB, open to close", "ours, overlay", 1.0, 2000.0),
        )
    )
    assert "| walk, warm | **1.31, missed:** 1.3 | 1.20 (1.2) |" in said
    assert "| drop 100 files of 4 KiB | **1.1 ms, missed:** 1 ms | 900 µs (1 ms) |" in said
    assert said.count("missed") == 2
    ahead = [line for line in said.splitlines() if line.startswith("- walk, warm")]
    assert ahead == ["- walk, warm: ours, overlay takes 1.0 times fuse-overlayfs"]


def test_a_page_keeps_what_is_around_its_figures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    data = _measured(("walk, warm", "ours, fuse", 1.0, 2.0))
    fill(page, data)
    assert page.read_text() == f"before\n{BEGIN}\n{figures(data)}\n{END}\nafter\n"
    fill(page, data)
    assert page.read_text().count(BEGIN) == 1
    page.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(NoPlace, match=r"page\.md"):
        fill(page, data)
    assert page.read_text() == f"{END}\n{BEGIN}\n"
    with pytest.raises(SystemExit) as refused:  # before anything is measured
        main(["--mode", "tiny", "--page", str(page)])
    assert refused.value.code == 2


def test_the_headline_chart_is_that_of_the_tables_and_none_of_its_bars_is_cut() -> None:
    drawn = headline.chart(headline.TABLES.read_text())
    assert headline.CHART.read_text() == drawn, "python -m benchmarks.headline draws it"
    box = float(re.findall(r'viewBox="0 0 (\d+)', drawn)[0])
    bars = [
        (float(width), float(at) + float(width))
        for at, width in re.findall(r'<rect class="\w" x="(\d+)" y="\d+" width="([\d.]+)"', drawn)
    ]
    assert len(bars) == 3 * len(headline.ROWS) + 3
    assert len(set(bars)) > len(headline.ROWS)
    assert max(end for _, end in bars) < box
    assert min(width for width, _ in bars) > 0


def test_the_page_of_the_documents_has_a_place_for_figures(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((REPOSITORY / "docs/benchmarks-full.md").read_text())
    fill(page, _measured(("walk, warm", "ours, fuse", 1.0, 2.0)))
    assert "at commit" in page.read_text()


@pytest.mark.slow
def test_the_benchmark_runs_and_leaves_nothing(place: Path) -> None:
    (place / "disk").mkdir()
    command = [sys.executable, "-m", "benchmarks", "--mode", "tiny", "--only", "content"]
    command += ["--contestant", "ours, fuse", "--place", f"{place}/disk"]
    done = subprocess.run(
        [*command, "--json", f"{place}/figures.json", "--svg", f"{place}/bars.svg", "--quiet"],
        cwd=REPOSITORY,
        env={**os.environ, "BRANCHFS": find_program()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| ours, fuse |" in done.stdout
    (workload,) = json.loads((place / "figures.json").read_text())["workloads"]
    assert workload["refused"] == {}
    ours = [figure for figure in workload["figures"] if figure["contestant"] == "ours, fuse"]
    assert len(ours) == 5
    assert all(figure["ratio"]["minimum"] > 0 for figure in ours)
    assert workload["fuse_requests"]["open"] > 0
    assert ElementTree.parse(place / "bars.svg").getroot().tag.endswith("svg")
    assert list((place / "disk").iterdir()) == []
    # The picture, the tables and a page again, from the figures alone.
    again = place / "again.svg"
    page = place / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert main(["--read", f"{place}/figures.json", "--svg", str(again), "--page", str(page)]) == 0
    assert again.read_text() == (place / "bars.svg").read_text()
    assert done.stdout in page.read_text()


def test_a_simulated_call_waits_for_its_bottleneck() -> None:
    """Cases whose time is known: the program alone, the slots alone, the base alone."""
    free = Costs(driver_seconds=0.0, attempt_seconds=0.0, base_bytes=0.0, unpack_seconds=0.0)
    program = simulate(replace(free, driver_seconds=0.01), attempts=100, nodes=10, slots=1)
    assert program.bottleneck == "the calling program"
    assert program.seconds == pytest.approx(1.0)
    assert program.driver_busy == pytest.approx(1.0)
    slots = simulate(replace(free, work_seconds=2.0), attempts=100, nodes=5, slots=2)
    assert slots.bottleneck == "the slots of the nodes"
    assert slots.seconds == pytest.approx(20.0)
    assert slots.slots_busy == pytest.approx(1.0)
    costs = replace(free, base_bytes=1e6, network_bytes_per_second=1e6)
    base = simulate(costs, attempts=3, nodes=3, slots=1)
    assert base.bottleneck == "the base's way to the nodes"
    assert base.seconds <= 3.0


def test_the_costs_of_attempts_are_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without containers, which take an image."""

    def no_containers(_base: Path, _scratch: Path) -> NoReturn:
        raise Cannot("no containers here")

    monkeypatch.setattr(attempts, "containers", no_containers)
    monkeypatch.setenv("BRANCHFS", find_program())
    words = ["--mode", "attempts", "--files", "20", "--runs", "2", "--place", str(place), "--quiet"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^\| ([^|]*?) \| \d", shown, re.MULTILINE) == [
        *("cp -a", "git worktree"),
        *("branching run, fuse", "branching, library, fuse"),
        *("branching run, overlay", "branching, library, overlay"),
    ]
    assert "| cp -a |" in shown
    assert "1.000 (1.000 to 1.000)" in shown
    assert "- missing: no containers here" in shown
    assert [*place.iterdir()] == []


def test_a_criu_that_does_not_run_is_a_reason_and_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(session_benchmark, "CRIU_SECONDS_MAX", 0.2)
    with pytest.raises(RuntimeError, match="is not installed"):
        session_benchmark.criu(1)
    program = tmp_path / "criu"
    for text, reason in (
        (
            "echo Warn >&2; echo 'Error (vdso.c): bad bounds' >&2; exit 1",
            "`criu check` failed: .*bad",
        ),
        ("exec /bin/sleep 600", "`criu check` did not end"),
    ):
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
        with pytest.raises(RuntimeError, match=reason):
            session_benchmark.criu(1)
