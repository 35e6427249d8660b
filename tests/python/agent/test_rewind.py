"""Checkpoints hold conversation and files; a merge can be overridden."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from conftest import Mounted
from support.agents import (
    Runners,
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    died,
    run,
    specs,
    writing,
)

from branching import Branch, ConflictError, Workspace
from branching.agent.branch_runtime import now
from branching.agent.checkpoint import Checkpoint, InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError, MergeConflictError
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.protocols import Judgement, Question
from branching.agent.types import ConfidenceSignals, MergeStrategy

PARENT = [{"role": "user", "content": "hi"}]
SEED = "seed.txt"


def tree(top: Path) -> dict[str, str]:
    """All files, what kind of file each is, and what is in it."""
    found = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if name.startswith((".branching", "@")):
            continue
        mode = f"{path.lstat().st_mode:o}"
        if path.is_symlink():
            found[name] = f"{mode} -> {path.readlink()}"
        else:
            found[name] = mode + ("" if path.is_dir() else f" {path.read_text()}")
    return found


async def says(runner: ScriptedRunner) -> None:
    """A run without files."""
    await runner.say("done")


class Verdict:
    """A verdict of a judge."""

    def __init__(self, winner: str, confidence: float) -> None:
        self.winner_branch_id = winner
        self.confidence = confidence
        self.reasoning = "because"


class Picking:
    """A judge that picks the branch with a label."""

    def __init__(self, label: str, confidence: float = 0.9) -> None:
        self.label, self.confidence = label, confidence
        self.asked: list[Question] = []

    async def __call__(self, question: Question) -> Judgement:
        self.asked.append(question)
        winner = next((o.branch_id for o in question.outcomes if o.label == self.label), "nobody")
        return Judgement(
            verdict=Verdict(winner, self.confidence),
            signals=ConfidenceSignals(
                quality_spread=0.5, test_pass_ratio=None, internal_consistency=1.0
            ),
            effective_confidence=self.confidence,
        )


async def forked(
    place: Workspace | Branch | None, judge: Picking | None = None, **scripts: object
) -> ForkCoordinator:
    if not scripts and place is None:
        scripts = {"a": says, "b": says}
    elif not scripts:
        scripts = {label: writing(**{label: label, SEED: f"{label}\n"}) for label in "ab"}
    made = coordinator(place, scripts, judge=judge)  # type: ignore[arg-type]
    await made.fork(specs(*scripts), parent_history=PARENT)
    await all_ended(made)
    return made


class TestCheckpoints:
    @pytest.mark.contract("I1")
    def test_checkpoints_are_saved_before_the_runs_and_after_the_merge(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = await forked(workspace)
                store = made.checkpoint_manager.store
                assert store is not None
                [before] = store.list_all()
                assert before.label == f"fork:{made.fork_id}"
                assert before.id == made.handle.parent_checkpoint_id  # type: ignore[union-attr]
                assert made.codec.load(before.history) == PARENT
                merged = await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                after = store.list_all()[-1]
                assert after.label == f"post-fork:{made.fork_id}"
                assert made.codec.load(after.history) == merged.history_after_merge
                await made.aclose()

        run(work())

    @pytest.mark.contract("I3")
    def test_the_oldest_checkpoints_are_pruned_first(self) -> None:
        store = InMemoryCheckpointStore(max_checkpoints=2)
        for name in "abc":
            store.save(Checkpoint(id=name, label=name, created_at=now(), history=b"[]"))
        assert [kept.id for kept in store.list_all()] == ["b", "c"]
        assert store.get("a") is None
        store.remove("b")
        assert [kept.id for kept in store.list_all()] == ["c"]

    @pytest.mark.contract("I4", "L15")
    @pytest.mark.parametrize("in_branch", [False, True], ids=["main", "branch"])
    def test_a_rewind_restores_conversation_and_files(self, real: Mounted, in_branch: bool) -> None:
        """Also across a merge, in both directions."""
        (real.base / "d").mkdir()
        (real.base / "d" / "f").write_text("deep")
        (real.base / "run").write_text("#!\n")
        (real.base / "run").chmod(0o755)

        async def script(runner):  # type: ignore[no-untyped-def]
            top = runner.branch.path
            (top / "d" / "f").unlink()
            (top / "d").rmdir()
            (top / "d").symlink_to(SEED)
            (top / "run").chmod(0o600)
            (top / "new").mkdir()
            (top / "new" / "x").write_text("x")
            await runner.say("changed")

        async def work(workspace: Workspace, place: Workspace | Branch, top: Path) -> None:
            if isinstance(place, Branch):
                (top / "own").write_text("of the session")
            before = tree(top)
            made = await forked(place, a=script)
            merged = await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
            after = tree(top)
            assert after != before
            store = made.checkpoint_manager.store
            assert store is not None
            first, second = store.list_all()
            assert await made.rewind(first.id) == PARENT
            assert tree(top) == before
            assert await made.rewind(second.id) == merged.history_after_merge
            assert tree(top) == after
            assert await made.rewind(first.id) == PARENT
            assert tree(top) == before
            given_up = store.list_all()[-1]
            assert given_up.label == f"before-rewind:{first.id}"
            assert await made.rewind(given_up.id) == merged.history_after_merge
            assert tree(top) == after
            with pytest.raises(ValueError, match="no checkpoint"):
                await made.rewind("x")
            await made.aclose()

        async def session() -> None:
            with Workspace(real.root) as workspace:
                if not in_branch:
                    await work(workspace, workspace, real.root)
                    return
                with workspace.branch("session") as branch:
                    await work(workspace, branch, branch.path)
            assert (real.base / "own").read_text() == "of the session"

        run(session())

    def test_later_changes_by_others_are_not_lost(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = await forked(workspace)
                await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                (real.base / SEED).write_text("third\n")
                store = made.checkpoint_manager.store
                assert store is not None
                with pytest.raises(ConflictError):
                    await made.rewind(store.list_all()[0].id)
                assert (real.base / SEED).read_text() == "third\n"
                await made.aclose()

        run(work())

    def test_not_while_a_fork_is_open(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = await forked(workspace)
                with pytest.raises(ForkStateError, match="fork is open"):
                    await made.rewind("x")
                await made.aclose()

        run(work())

    def test_files_that_cannot_be_kept_are_reported(self, real: Mounted) -> None:
        """A socket has no place in an archive: the conversation is kept all the same."""

        async def work() -> None:
            with Workspace(real.root) as workspace, workspace.branch("session", None) as session:
                here = Path.cwd()
                os.chdir(session.path)
                try:
                    with socket.socket(socket.AF_UNIX) as listener:
                        listener.bind("socket")
                finally:
                    os.chdir(here)
                with pytest.warns(UserWarning, match="holds the conversation only"):
                    made = await forked(session)
                store = made.checkpoint_manager.store
                assert store is not None
                assert store.list_all()[0].tree is None
                with pytest.warns(UserWarning, match="holds the conversation only"):
                    await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                with pytest.warns(UserWarning, match="holds the conversation only"):
                    assert await made.rewind(store.list_all()[0].id) == PARENT
                await made.aclose()
                session.abort()

        run(work())


@pytest.mark.contract("L19")
@pytest.mark.parametrize("in_branch", [False, True], ids=["main", "branch"])
class TestOverride:
    """A merge made by a judge is undone, and another branch is merged."""

    def test_another_branch_wins_after_all(self, real: Mounted, in_branch: bool) -> None:
        async def work(place: Workspace | Branch, top: Path) -> None:
            made = await forked(place, Picking("a"))
            assert made.parent_path is not None
            (made.parent_path / "own").write_text("parent")
            b = branch_of(made, "b")
            assert b.path is not None
            (b.path / "b").chmod(0o4755)
            outcome = await made.resolve(MergeStrategy(kind="auto"))
            assert outcome.committed
            assert (top / "a").exists()
            with pytest.raises(ForkStateError, match="is the merged branch"):
                await made.override(branch_of(made, "a").id)
            merged = await made.override(b.id)
            assert merged.winner_branch_id == b.id
            assert merged.applied_paths == ("b", SEED)
            assert merged.history_after_merge == b.history
            # Only what is committed to the workspace itself is warned of.
            assert [each.path for each in merged.privileged] == ([] if in_branch else ["b"])
            assert (top / SEED).read_text() == "b\n"
            assert not (top / "a").exists()
            assert (top / "own").read_text() == "parent"
            with pytest.raises(ForkStateError, match="no automatic merge"):
                await made.override(b.id)
            await made.aclose()

        run(_in(real, in_branch, work))

    def test_override_is_refused_if_files_changed_since_the_merge(
        self, real: Mounted, in_branch: bool
    ) -> None:
        async def work(place: Workspace | Branch, top: Path) -> None:
            made = await forked(place, Picking("a"))
            await made.resolve(MergeStrategy(kind="auto"))
            (top / SEED).write_text("since\n")
            with pytest.raises(ConflictError):
                await made.override(branch_of(made, "b").id)
            assert (top / SEED).read_text() == "since\n"
            assert (top / "a").exists()
            await made.aclose()

        run(_in(real, in_branch, work))

    def test_override_is_refused_for_paths_that_the_parent_changed(
        self, real: Mounted, in_branch: bool
    ) -> None:
        async def work(place: Workspace | Branch, top: Path) -> None:
            made = await forked(place, Picking("a"))
            assert made.parent_path is not None
            (made.parent_path / "b").write_text("parent's b")
            await made.resolve(MergeStrategy(kind="auto"))
            with pytest.raises(MergeConflictError) as caught:
                await made.override(branch_of(made, "b").id)
            assert caught.value.paths == ("b",)
            assert (top / "b").read_text() == "parent's b"
            assert (top / "a").exists()
            await made.aclose()

        run(_in(real, in_branch, work))


@pytest.mark.contract("L19")
@pytest.mark.parametrize("in_branch", [False, True], ids=["main", "branch"])
class TestOverrideByAnotherProcess:
    """The process that made the judge's merge has exited."""

    def merged(self, real: Mounted, in_branch: bool, label: str = "a") -> str:
        """Has the branch `label` of two merged automatically; returns the fork's id."""
        died(
            real.root,
            f"""
            from agent.test_rewind import Picking, MergeStrategy
            async def main():
                place = workspace
                if {in_branch}:
                    place = place_module.ParentWorkspace(workspace).find("session")
                    place = place or workspace.branch("session", None, None).__enter__()
                scripts = {{name: writing(**{{name: name, "seed.txt": name}}) for name in "ab"}}
                made = coordinator(place, scripts, store=store, judge=Picking({label!r}))
                await made.fork(specs("a", "b"), parent_history=[dict(role="user", content="hi")])
                (made.parent_path / "own").write_text("parent")
                await all_ended(made)
                await made.resolve(MergeStrategy(kind="auto"))
                await made.aclose()
            asyncio.run(main())
            now()
            """,
        )
        with Workspace(real.root) as workspace:
            store = SQLiteForkStateStore.beside(workspace)
            [kept] = store.list_all()
            store.close()
        assert kept.phase == "resolved"
        return kept.fork_id

    def overridden(
        self, real: Mounted, in_branch: bool, fork_id: str, check: Callable[..., Awaitable[None]]
    ) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                place = workspace.reopen("session") if in_branch else workspace
                store = SQLiteForkStateStore.beside(workspace)
                made = await ForkCoordinator.resume(
                    fork_id, store=store, runner=Runners({}), place=place
                )
                try:
                    await check(made, store, place.path)
                finally:
                    await made.aclose()
                    store.close()
                    if isinstance(place, Branch):
                        place.abort()

        run(work())

    @pytest.mark.contract("L19")
    def test_another_branch_wins_after_all(self, real: Mounted, in_branch: bool) -> None:
        async def check(made: ForkCoordinator, store: SQLiteForkStateStore, top: Path) -> None:
            assert (top / SEED).read_text() == "a"
            with pytest.raises(ForkStateError, match="is the merged branch"):
                await made.override(branch_of(made, "a").id)
            merged = await made.override(branch_of(made, "b").id)
            said = [message["content"] for message in merged.history_after_merge]
            assert said == ["hi", "go b", "done"]
            assert merged.applied_paths == ("b", SEED)
            assert (top / SEED).read_text() == "b"
            assert not (top / "a").exists()
            assert (top / "own").read_text() == "parent"
            assert store.list_all() == []
            assert store.home is not None
            assert list(store.home.iterdir()) == []

        self.overridden(real, in_branch, self.merged(real, in_branch), check)

    def test_override_is_refused_if_files_changed_since_the_merge(
        self, real: Mounted, in_branch: bool
    ) -> None:
        async def check(made: ForkCoordinator, store: SQLiteForkStateStore, top: Path) -> None:
            (top / "a").write_text("since")
            with pytest.raises(ConflictError):
                await made.override(branch_of(made, "b").id)
            assert (top / "a").read_text() == "since"
            assert (top / SEED).read_text() == "a"

        self.overridden(real, in_branch, self.merged(real, in_branch), check)

    def test_a_process_that_dies_in_it_leaves_it_to_be_taken_again(
        self, real: Mounted, in_branch: bool
    ) -> None:
        fork_id = self.merged(real, in_branch)
        died(
            real.root,
            f"""
            from branching.agent.coordinator import ForkCoordinator
            from branching.fs import Branch
            place = workspace.reopen("session") if {in_branch} else workspace
            commit, prepared = Branch.commit, []
            def dying(self, **options):
                if prepared: now()  # both archives are loaded, and nothing has landed
                if self.name.endswith(".branch"): prepared.append(self)
                return commit(self, **options)
            Branch.commit = dying
            async def main():
                made = await ForkCoordinator.resume(
                    {fork_id!r}, store=store, runner=Runners({{}}), place=place
                )
                await made.override(branch_of(made, "b").id)
            asyncio.run(main())
            """,
        )

        async def check(made: ForkCoordinator, store: SQLiteForkStateStore, top: Path) -> None:
            assert not (top / "a").exists()
            assert not (top / "b").exists()
            await made.override(branch_of(made, "b").id)
            assert (top / SEED).read_text() == "b"
            assert (top / "own").read_text() == "parent"
            assert not (top / "a").exists()

        self.overridden(real, in_branch, fork_id, check)

    def test_a_merge_that_was_undone_is_overridden_too(
        self, real: Mounted, in_branch: bool
    ) -> None:
        fork_id = self.merged(real, in_branch)
        if in_branch:
            with Workspace(real.root) as workspace:
                session = workspace.reopen("session")
                (session.path / "a").unlink()  # by hand: nobody knows that this is an undo

            async def refused(made: ForkCoordinator, *_: object) -> None:
                with pytest.raises(ConflictError, match="changed since the merge"):
                    await made.override(branch_of(made, "b").id)

            self.overridden(real, in_branch, fork_id, refused)
            return
        with Workspace(real.root) as workspace:
            workspace.undo()

        async def check(made: ForkCoordinator, _: SQLiteForkStateStore, top: Path) -> None:
            await made.override(branch_of(made, "b").id)
            assert (top / SEED).read_text() == "b"
            assert not (top / "a").exists()

        self.overridden(real, in_branch, fork_id, check)

    def test_of_each_place_the_last_one_is_kept(self, real: Mounted, in_branch: bool) -> None:
        first = self.merged(real, in_branch)
        second = self.merged(real, in_branch, label="b")
        assert first != second  # and there is one, which `merged` has looked at
        if in_branch:
            with Workspace(real.root) as workspace:
                workspace.reopen("session").abort()


async def _in(real: Mounted, in_branch: bool, work) -> None:  # type: ignore[no-untyped-def]
    with Workspace(real.root) as workspace:
        if not in_branch:
            await work(workspace, real.root)
            return
        with workspace.branch("session") as session:
            await work(session, session.path)


class TestResolve:
    """How the coordinator acts on a verdict, by strategy."""

    @pytest.mark.contract("G1")
    def test_a_manual_strategy_calls_no_judge(self) -> None:
        async def work() -> None:
            judge = Picking("a")
            made = await forked(None, judge)
            outcome = await made.resolve(MergeStrategy(kind="manual"))
            assert (outcome.committed, outcome.auto_eligible, outcome.verdict) == (
                False,
                False,
                None,
            )
            assert judge.asked == []
            await made.aclose()

        run(work())

    @pytest.mark.contract("B23", "D14", "G2", "G4")
    @pytest.mark.parametrize("kind", ["auto", "vote"])
    def test_the_judges_choice_is_committed(self, kind: str, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                judge = Picking("b", confidence=0.1)
                made = await forked(workspace, judge)
                outcome = await made.resolve(MergeStrategy(kind=kind))  # type: ignore[arg-type]
                assert outcome.committed
                assert outcome.merge_result is not None
                assert outcome.merge_result.winner_label == "b"
                [question] = judge.asked
                assert question.report.summary.total_paths_touched == 3
                assert [o.final_message for o in question.outcomes] == ["done", "done"]
                await made.aclose()

        run(work())
        assert (real.base / "b").exists()

    @pytest.mark.contract("G3", "G15", "P12")
    @pytest.mark.parametrize(("confidence", "eligible"), [(0.8, True), (0.79, False)])
    def test_auto_with_fallback_commits_nothing(self, confidence: float, eligible: bool) -> None:
        """The judge is called once."""

        async def work() -> None:
            judge = Picking("a", confidence)
            made = await forked(None, judge)
            for _ in range(2):
                outcome = await made.resolve()
                assert (outcome.committed, outcome.auto_eligible) == (False, eligible)
            assert len(judge.asked) == 1
            assert not made.is_resolved
            task = await made.run_on_branch(branch_of(made, "a").id, "more")
            await task
            await made.resolve()
            assert len(judge.asked) == 2  # there is more to be judged
            await made.aclose()

        run(work())

    def test_a_judge_that_picks_no_branch_merges_nothing(self) -> None:
        async def work() -> None:
            made = await forked(None, Picking("x"))
            with pytest.raises(ForkStateError, match="which cannot win"):
                await made.resolve(MergeStrategy(kind="auto"))
            assert not made.is_resolved
            await made.aclose()

        run(work())

    @pytest.mark.contract("C6")
    def test_no_judge_is_called_if_all_branches_failed(self) -> None:
        async def fails(runner: object) -> None:
            raise KeyError

        async def work() -> None:
            judge = Picking("a")
            made = await forked(None, judge, a=fails)
            with pytest.raises(ForkStateError, match="no branch can win"):
                await made.resolve(MergeStrategy(kind="auto"))
            await made.aclose()

        run(work())

    @pytest.mark.contract("D9")
    def test_without_a_person_no_question_is_asked(self) -> None:
        """An automatic merge denies approvals that wait for a person."""

        async def asks(runner) -> None:  # type: ignore[no-untyped-def]
            assert await runner.branch.ask("shell", "rm") == "deny"
            await runner.say("denied")

        async def work() -> None:
            made = coordinator(None, {"a": asks}, judge=Picking("a"))
            await made.fork(specs("a"))
            outcome = await made.resolve(MergeStrategy(kind="auto"))
            assert outcome.merge_result is not None
            assert outcome.merge_result.blocked_commands == ("shell rm",)
            await made.aclose()

        run(work())

    @pytest.mark.contract("B22")
    def test_tests_of_all_branches_run_concurrently(self) -> None:
        async def work() -> None:
            import asyncio

            here: list[str] = []
            together = asyncio.Event()

            async def tester(branch) -> float | None:  # type: ignore[no-untyped-def]
                here.append(branch.id)
                if len(here) == 2:
                    together.set()
                await together.wait()
                return 0.5

            made = await forked(None)
            made.tester = tester
            outcomes = await made.outcomes()
            assert [outcome.test_pass_ratio for outcome in outcomes] == [0.5, 0.5]
            assert [outcome.error_count for outcome in outcomes] == [0, 0]
            await made.aclose()

        run(work())
