"""The report on the changes of branches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.agents import (
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    run,
    specs,
    writing,
)

from branching import Branch, Workspace
from branching import Change as FileChange
from branching.agent.diff import build_diff_report, diff_tool_calls
from branching.agent.diff.text import DIFF_LINES_MAX, TEXT_BYTES_MAX, unified, with_hunks
from branching.agent.fork_files import ForkFiles
from branching.agent.protocols import ToolCall
from branching.agent.types import BranchDiffReport, PathDiff
from branching.errors import BranchError, BranchNotFoundError, BranchStaleError
from branching.fs.branchfs import BranchFS
from branching.fs.confined_dir import ConfinedDir

SEED = "seed.txt"
Change = Callable[[Path], object]


def nothing(top: Path) -> None:
    """A branch that changes nothing."""


def write(path: str, data: str | bytes) -> Change:
    def change(top: Path) -> None:
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_bytes(data.encode() if isinstance(data, str) else data)

    return change


def delete(path: str) -> Change:
    return lambda top: (top / path).unlink()


def report(real: Mounted, *changes: Change, paths: list[str] | None = None) -> BranchDiffReport:
    """Forks, lets each branch make its change, and compares."""

    async def work() -> BranchDiffReport:
        with Workspace(real.root) as workspace:
            labels = [f"b{number}" for number in range(len(changes))]

            async def script(runner: ScriptedRunner) -> None:
                assert runner.branch.path is not None
                changes[labels.index(runner.branch.spec.label)](runner.branch.path)
                await runner.say("done")

            made = coordinator(workspace, dict.fromkeys(labels, script))
            await made.fork(specs(*labels))
            try:
                await all_ended(made)
                assert {b.status.error for b in made.branches.values()} == {None}
                found = await made.diff_branches(paths)
                same = build_diff_report(made.fork_id or "", made.branches, paths_filter=paths)
                assert found == same
                return found
            finally:
                await made.aclose()

    return run(work())


def only(found: BranchDiffReport) -> PathDiff:
    [path] = found.paths
    return path


@pytest.mark.contract("H1", "H2")
@pytest.mark.parametrize(
    ("changes", "agreement"),
    [
        ((write("f", "x"), write("f", "x")), "unanimous_change"),
        ((write("f", "x"), write("f", "y")), "split"),
        ((write("f", "x"), write("f", "x"), write("f", "y")), "split"),
        ((write("f", "x"), nothing), "unique"),
        ((delete(SEED), delete(SEED)), "unanimous_change"),
        ((delete(SEED), write(SEED, "x")), "split"),
        ((delete(SEED), nothing), "unique"),
    ],
)
def test_agreement_is_derived_from_the_final_results(
    real: Mounted, changes: tuple[Change, ...], agreement: str
) -> None:
    assert only(report(real, *changes)).agreement == agreement


@pytest.mark.contract("B13", "B14", "B16")
def test_each_branch_has_one_entry_with_its_final_content(real: Mounted) -> None:
    def twice(top: Path) -> None:
        (top / SEED).unlink()
        (top / SEED).write_text("again\n")

    found = only(report(real, twice, nothing))
    first, second = found.branches.values()
    assert found.parent_content == "seed\n"
    assert (first.operation, first.new_content, first.size_bytes) == ("modified", "again\n", 6)
    assert first.unified_diff_vs_parent == (
        f"--- a/{SEED}\n+++ b/{SEED}\n@@ -1 +1 @@\n-seed\n+again\n"
    )
    assert (second.operation, second.new_content) == ("untouched", None)
    assert (first.branch_label, second.branch_label) == ("b0", "b1")


@pytest.mark.contract("B13")
def test_created_and_deleted_files_are_reported_sorted_by_name(real: Mounted) -> None:
    found = report(real, write("new", "n"), delete(SEED))
    new, seed = found.paths
    assert [path.path for path in found.paths] == ["new", SEED]  # sorted by name
    assert new.parent_content is None
    assert [change.operation for change in new.branches.values()] == ["created", "untouched"]
    assert [change.operation for change in seed.branches.values()] == ["untouched", "deleted"]
    assert (list(seed.branches.values())[1].unified_diff_vs_parent or "").endswith("-seed\n")


@pytest.mark.contract("B15", "H3")
def test_the_summary_counts_paths_and_the_agreement_score(real: Mounted) -> None:
    """Unique paths count neither as agreement nor as split."""

    def both(text: str, own: str) -> Change:
        def change(top: Path) -> None:
            write("split", text)(top)
            write("same", "s")(top)
            write(own, "x")(top)

        return change

    summary = report(real, both("1", "o1"), both("2", "o2")).summary
    assert (summary.total_paths_touched, summary.unanimous_paths, summary.split_paths) == (4, 1, 1)
    assert sorted(summary.per_branch_unique.values()) == [1, 1]
    assert summary.agreement_score == 0.75
    assert report(real, nothing, nothing).summary.agreement_score == 1.0


class TestFilter:
    @pytest.mark.contract("H6")
    def test_a_filter_keeps_untouched_paths(self, real: Mounted) -> None:
        found = report(real, write("f", "x"), nothing, paths=[SEED, "f"])
        assert [(path.path, path.agreement) for path in found.paths] == [
            ("f", "unique"),
            (SEED, "unanimous_no_change"),
        ]

    def test_a_filter_makes_no_perfect_score(self, real: Mounted) -> None:
        found = report(real, write("f", "x"), write("f", "y"), paths=[SEED])
        assert found.summary.agreement_score == 0.0


class TestBinary:
    @pytest.mark.contract("H5", "L7")
    def test_a_file_with_a_nul_byte_is_binary(self, real: Mounted) -> None:
        change = only(report(real, write("f", b"\0" * 9))).branches.values()
        [one] = change
        assert one.is_binary
        assert one.new_content is None
        assert one.unified_diff_vs_parent == "[binary · 9 bytes · sha256:3e7077fd2f66]\n"

    @pytest.mark.contract("H9")
    def test_binaries_that_differ_only_at_the_end_are_split(self, real: Mounted) -> None:
        start = b"\0" * 100_000
        found = report(real, write("f", start + b"1"), write("f", start + b"2"))
        assert only(found).agreement == "split"

    @pytest.mark.contract("P14")
    def test_texts_that_are_no_utf_8_are_compared_by_their_bytes(self, real: Mounted) -> None:
        texts = "é\n".encode("latin-1"), "è\n".encode("latin-1")
        found = report(real, *(write("f", text) for text in texts))
        assert only(found).agreement == "split"
        assert found.summary.agreement_score == 0.0

    def test_a_text_that_is_too_big_is_shown_by_its_digest(self, real: Mounted) -> None:
        big = "x\n" * TEXT_BYTES_MAX
        [one] = only(report(real, write("f", big))).branches.values()
        assert (one.unified_diff_vs_parent or "").startswith("[too big to be compared")
        assert one.size_bytes == len(big)


@pytest.mark.contract("H4")
def test_a_long_diff_shows_head_and_tail() -> None:
    diff = unified("", "".join(f"{number}\n" for number in range(2000)), "f")
    lines = diff.splitlines()
    assert len(lines) == DIFF_LINES_MAX + 1
    assert "[1503 lines truncated]" in lines
    assert lines[-1] == "+1999"


def test_a_diff_says_where_the_last_line_has_no_end() -> None:
    assert unified("a\n", "b", "f").endswith("+b\n\\ No newline at end of file\n")


def test_modes_and_links_are_part_of_the_result(real: Mounted) -> None:
    def executable(top: Path) -> None:
        write("f", "x")(top)
        (top / "f").chmod(0o755)

    assert only(report(real, write("f", "x"), executable)).agreement == "split"

    def link(target: str) -> Change:
        return lambda top: (top / "l").symlink_to(target)

    assert only(report(real, link("a"), link("b"))).agreement == "split"
    assert only(report(real, link("a"), link("a"))).agreement == "unanimous_change"


@pytest.mark.contract("L8")
def test_a_renamed_file_is_paired_with_its_old_name(real: Mounted) -> None:
    (real.base / "d").mkdir()
    (real.base / "d" / "f").write_text("content\n")
    found = report(real, lambda top: (top / "d").rename(top / "e"), nothing)
    by_path = {path.path: next(iter(path.branches.values())) for path in found.paths}
    assert sorted(by_path) == ["d/f", "e/f"]
    assert by_path["e/f"].renamed_from == "d/f"
    assert by_path["d/f"].operation == "deleted"


def test_an_empty_directory_is_reported_and_a_full_one_is_not(real: Mounted) -> None:
    def directories(top: Path) -> None:
        (top / "empty").mkdir()
        write("full/f", "x")(top)

    assert [path.path for path in report(real, directories).paths] == ["empty", "full/f"]


def test_a_link_that_leads_out_is_not_followed(real: Mounted) -> None:
    [one] = only(report(real, lambda top: (top / "l").symlink_to("/etc/passwd"))).branches.values()
    assert one.new_content == "/etc/passwd"
    assert one.identity == "link /etc/passwd"


@pytest.mark.contract("B12")
def test_changes_are_in_chronological_order(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:

            async def script(runner: ScriptedRunner) -> None:
                for name in ("z", "a", "m"):
                    runner.write(name, "x")
                    overlay = runner.branch.overlay
                    assert overlay is not None
                    first = overlay.changes()[-1]
                    assert (first.path, first.op) == (name, "write")
                    await _next_tick(runner)

            made = coordinator(workspace, {"a": script})
            await made.fork(specs("a"))
            await all_ended(made)
            assert branch_of(made, "a").status.error is None
            await made.aclose()

    run(work())


async def _next_tick(runner: ScriptedRunner) -> None:
    """Waits until the file system's clock has gone on."""
    assert runner.branch.path is not None
    probe = runner.branch.path / ".probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns <= before:
        probe.touch()
    probe.unlink()


@pytest.mark.contract("L9")
def test_tool_calls_are_compared_in_order() -> None:
    ls, cat, rm = (ToolCall(name=name) for name in ("ls", "cat", "rm"))
    found = diff_tool_calls({"a": [ls, cat, rm], "b": [ls, rm, rm]})
    assert found.common_prefix == 1
    kinds = [(step.kind, step.call.name) for step in found.steps["a", "b"]]
    assert kinds == [("same", "ls"), ("only_first", "cat"), ("same", "rm"), ("only_second", "rm")]
    assert found.counts == {"a": {"cat": 1, "ls": 1, "rm": 1}, "b": {"ls": 1, "rm": 2}}
    assert diff_tool_calls({}).common_prefix == 0


@pytest.mark.contract("L9")
def test_tool_calls_are_read_from_the_conversations() -> None:
    async def work() -> None:
        async def calls(runner: ScriptedRunner) -> None:
            name = f"tool {runner.branch.spec.label}"
            await runner.say("", tool_calls=[{"name": "ls"}, {"name": name, "arguments": {"x": 1}}])

        made = coordinator(None, {"a": calls, "b": calls})
        await made.fork(specs("a", "b"))
        await all_ended(made)
        assert made.diff_tools().common_prefix == 1
        await made.aclose()

    run(work())


def test_hunks_are_taken_one_by_one() -> None:
    before = "".join(f"{number}\n" for number in range(30))
    after = before.replace("3\n", "three\n", 1).replace("25\n", "")
    assert with_hunks(before, after, []) == before
    assert with_hunks(before, after, [0, 1]) == after
    assert with_hunks(before, after, [1]) == before.replace("25\n", "")


@pytest.mark.contract("H7")
def test_every_file_is_read_once_in_each_tree(
    real: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost follows the changed files: what was there at the fork is not read for each branch
    again. A step records originals for the merge in a thread of its own, which reads, too."""
    monkeypatch.setattr(ForkFiles, "record_originals", lambda *_: None)
    (real.base / "gone").write_text("moved\n")
    read: Counter[tuple[Path, str]] = Counter()
    step = ConfinedDir.read

    def counted(tree: ConfinedDir, path: str, **options: int) -> tuple[bytes, int]:
        read[tree._directory, path] += 1
        return step(tree, path, **options)

    def moved(top: Path) -> None:
        (top / "gone").unlink()
        (top / "here").write_text("moved\n")

    async def work() -> None:
        with Workspace(real.root) as workspace:

            async def script(runner: ScriptedRunner) -> None:
                runner.write(SEED, runner.branch.spec.label)
                moved(runner.branch.path or Path())
                await runner.say("done")

            labels = [f"b{number}" for number in range(4)]
            made = coordinator(workspace, dict.fromkeys(labels, script))
            await made.fork(specs(*labels))
            try:
                await all_ended(made)
                monkeypatch.setattr(ConfinedDir, "read", counted)
                assert len((await made.diff_branches()).paths) == 3
            finally:
                monkeypatch.undo()
                await made.aclose()

    run(work())
    assert set(read.values()) == {1}
    # The seed and the new file in each branch, and what was there at the fork of two of the three.
    assert len(read) == 4 * 2 + 2


@pytest.mark.contract("H8")
def test_a_report_can_be_made_while_branches_write(real: Mounted) -> None:
    """Each file is as it was at some moment, and the last report as it is at the end."""

    async def work() -> None:
        with Workspace(real.root) as workspace:
            go_on = True

            async def script(runner: ScriptedRunner) -> None:
                number = 0
                while go_on:
                    number += 1
                    runner.write("f", f"{runner.branch.spec.label} {number}\n")
                    runner.write(f"d/{number % 5}", "x")
                    (Path(runner.branch.path or "") / f"d/{(number + 2) % 5}").unlink(
                        missing_ok=True
                    )
                    await asyncio.sleep(0)
                runner.write("f", runner.branch.spec.label)
                await runner.say("done")

            made = coordinator(workspace, dict.fromkeys("ab", script))
            await made.fork(specs("a", "b"))
            seen = 0
            while seen < 5:
                found = await made.diff_branches(["f"])
                for change in only(found).branches.values():
                    text = change.new_content or ""
                    assert f"{change.branch_label} ".startswith(text[:2])
                    seen += bool(text)
                await made.diff_branches()
            go_on = False
            await all_ended(made)
            last = only(await made.diff_branches(["f"]))
            assert [change.new_content for change in last.branches.values()] == ["a", "b"]
            await made.aclose()

    run(work())


@pytest.mark.parametrize(("failures", "is_reported"), [(9, True), (10, False)])
def test_changes_are_read_again_if_a_path_went_meanwhile(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, failures: int, is_reported: bool
) -> None:
    """The daemon answers like this while a run renames directories."""
    read = BranchFS.diff
    left = [failures]

    def diff(backend: BranchFS, branch: Any, **options: Any) -> list[FileChange]:
        if left[0]:
            left[0] -= 1
            raise BranchError("branch 'a' cannot be compared: dir was changed while it was read")
        return read(backend, branch, **options)

    async def work() -> BranchDiffReport:
        async with coordinator(real_workspace, {"a": writing(made="x")}) as made:
            await made.fork(specs("a"), parent_history=[])
            await all_ended(made)
            monkeypatch.setattr(BranchFS, "diff", diff)
            try:
                return build_diff_report("f", made.branches)
            finally:
                monkeypatch.setattr(BranchFS, "diff", read)

    if is_reported:
        assert [path.path for path in run(work()).paths] == ["made"]
    else:
        with pytest.raises(BranchError, match="changed while it was read"):
            run(work())
    assert left == [0]


@pytest.mark.parametrize("error", [BranchStaleError, BranchNotFoundError])
def test_a_dropped_or_stale_branch_is_not_read_again(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch, error: type[BranchError]
) -> None:
    read = Branch.diff
    reads: list[str] = []

    def diff(branch: Branch) -> list[FileChange]:
        reads.append(branch.name)
        raise error("it is gone")

    async def work() -> None:
        async with coordinator(real_workspace, {"a": writing(made="x")}) as made:
            await made.fork(specs("a"), parent_history=[])
            await all_ended(made)
            monkeypatch.setattr(Branch, "diff", diff)
            try:
                with pytest.raises(error):
                    build_diff_report("f", made.branches)
            finally:
                monkeypatch.setattr(Branch, "diff", read)

    run(work())
    assert len(reads) == 1
