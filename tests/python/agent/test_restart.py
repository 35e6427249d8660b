"""A fork outlives the process that made it.

The processes are real ones, and die by SIGKILL: while a fork is made, while runs are under way, and
at the commit that decides a merge.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from conftest import Mounted
from support.agents import (
    Runners,
    ScriptedRunner,
    branch_of,
    coordinator,
    died,
    forever,
    run,
    specs,
    until,
    writing,
)

from branching import ConflictError, Workspace
from branching.agent import process_cleanup
from branching.agent.branch_runtime import FORK_VARIABLE
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStoreError
from branching.agent.fork_state import ForkState, KeptBranch
from branching.agent.fork_store import InMemoryForkStateStore, SQLiteForkStateStore
from branching.agent.protocols import ForkStateStore
from branching.agent.types import (
    BranchIsolation,
    BranchSpec,
    BranchStatus,
    Budget,
    MergeStrategy,
    Usage,
)

PARENT = [{"role": "user", "content": "hi"}]


def state(fork_id: str, *, history: bytes = b"[]") -> ForkState:
    moment = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)
    return ForkState(
        fork_id=fork_id,
        phase="open",
        created_at=moment,
        workspace="/w",
        parent="outer",
        parent_files="x.parent",
        forked_ns=17,
        parent_history=b'["parent"]',
        isolation=BranchIsolation(todos="share"),
        strategy=MergeStrategy(kind="vote", judge_models=["a", "b"]),
        depth=1,
        budget=Budget(usd=2.0),
        branches=(
            KeptBranch(
                spec=BranchSpec("a", "go", budget_usd=1.0, budget=Budget(tokens=5)),
                status=BranchStatus(
                    id="x-0", label="a", state="done", last_activity_at=moment, error="é"
                ),
                files="x-a",
                usage=Usage(usd=None, tokens=3, requests=1),
                history=history,
                blocked=("rm",),
            ),
        ),
    )


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[ForkStateStore]:
    if request.param == "memory":
        yield InMemoryForkStateStore()
        return
    opened = SQLiteForkStateStore(place / "agents" / "forks.sqlite")
    yield opened
    opened.close()


@pytest.mark.contract("B25")
class TestStore:
    """Both stores behave the same."""

    @pytest.mark.contract("B25")
    def test_saved_state_is_read_back_complete(self, store: ForkStateStore) -> None:
        store.save(state("x"))
        assert store.get("x") == state("x")
        assert store.get("y") is None

    def test_the_newest_state_counts(self, store: ForkStateStore) -> None:
        store.save(state("x"))
        store.save(state("x", history=b"[1]"))
        found = store.get("x")
        assert found is not None
        assert found.branches[0].history == b"[1]"

    def test_all_are_listed_and_one_is_removed(self, store: ForkStateStore) -> None:
        store.save(state("x"))
        store.save(state("y"))
        assert [one.fork_id for one in store.list_all()] == ["x", "y"]
        store.remove("x")
        store.remove("x")
        assert [one.fork_id for one in store.list_all()] == ["y"]

    def test_another_connection_sees_what_was_saved(self, place: Path) -> None:
        path = place / "forks.sqlite"
        one, other = SQLiteForkStateStore(path), SQLiteForkStateStore(path)
        one.save(state("x"))
        assert other.get("x") == state("x")
        one.close()
        other.close()

    def test_a_file_that_is_none_is_an_error(self, place: Path) -> None:
        path = place / "forks.sqlite"
        path.write_bytes(b"no database at all, but long enough to be looked at" * 50)
        with pytest.raises(ForkStoreError, match="cannot be opened"):
            SQLiteForkStateStore(path)

    def test_a_state_that_is_damaged_is_an_error(self, place: Path) -> None:
        opened = SQLiteForkStateStore(place / "forks.sqlite")
        opened.save(state("x"))
        opened._database.connection.execute("UPDATE forks SET state = '{}'")
        with pytest.raises(ForkStoreError, match="cannot be read"):
            opened.get("x")
        opened.close()

    def test_it_lies_beside_the_branches_and_belongs_to_their_owner(self, real: Mounted) -> None:
        os.chown(real.base, 12345, 12346)
        with Workspace(real.root) as workspace:
            assert workspace.store is not None
            opened = SQLiteForkStateStore.beside(workspace)
            opened.save(state("x"))
            opened.close()
            assert (workspace.store / "agents" / "forks.sqlite").exists()
            assert not (real.root / ".branching").exists()


async def resumed(workspace: Workspace, fork_id: str) -> ForkCoordinator:
    store = SQLiteForkStateStore.beside(workspace)
    return await ForkCoordinator.resume(
        fork_id,
        store=store,
        runner=Runners(dict.fromkeys("abc", writing(more="x"))),
        place=workspace,
        checkpoint_store=InMemoryCheckpointStore(),
    )


def killed(real: Mounted, script: str) -> str:
    """See `died`; returns the id of the fork that is there."""
    died(real.root, script)
    with Workspace(real.root) as workspace:
        store = SQLiteForkStateStore.beside(workspace)
        [kept] = store.list_all()
        store.close()
    return kept.fork_id


@pytest.mark.contract("L1")
class TestKilled:
    """The process is killed by SIGKILL."""

    @pytest.mark.contract("L1")
    def test_while_runs_are_under_way(self, real: Mounted) -> None:
        """Done branches can be picked, running ones are terminated; what they left is killed."""
        fork_id = killed(
            real,
            """
            import subprocess
            async def hangs(runner):
                runner.write("half", "x")
                environment = {**os.environ, **runner.branch.environment}
                subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True)
                await runner.say("working", usd=0.25)
                runner.branch.capture(runner.messages)
                await asyncio.Event().wait()
            async def main():
                made = coordinator(
                    workspace, {"a": writing(won="a"), "b": hangs}, store=store,
                    aggregate_budget_usd=7.0,
                )
                await made.fork(specs("a", "b"), parent_history=[{"role": "user", "content": "hi"}])
                (made.parent_path / "own").write_text("parent")
                def saved():
                    kept = store.get(made.fork_id)
                    a, b = kept.branches
                    return a.status.state == "done" and b"working" in b.history
                await until(saved)
                now()
            asyncio.run(main())
            """,
        )

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = await resumed(workspace, fork_id)
                a, b = branch_of(made, "a"), branch_of(made, "b")
                assert (a.status.state, b.status.state) == ("done", "terminated")
                assert "process that ran it has ended" in (b.status.error or "")
                assert [m["content"] for m in b.partial_history or []] == ["hi", "go b", "working"]
                assert made.fork_cost().per_branch[1].cumulative_usd == 0.25
                assert made.fork_cost().aggregate_budget_usd == 7.0
                assert process_cleanup._marked(FORK_VARIABLE, f"{fork_id}/") == set()
                assert made.parent_path is not None
                assert (made.parent_path / "own").read_text() == "parent"
                task = await made.run_on_branch(a.id, "more")
                await task
                merged = await made.merge_or_select(f"pick:{a.id}")
                assert merged.applied_paths == ("more", "won")
                assert made.store.list_all() == []
                assert workspace.branches() == []
                await made.aclose()

        run(work())
        assert (real.base / "own").read_text() == "parent"
        assert not (real.base / "half").exists()

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_while_the_fork_is_made(self, real: Mounted, after: int) -> None:
        """The branches that exist by then are dropped, and the parent is not frozen."""
        fork_id = killed(
            real,
            f"""
            create, made_so_far = place_module.ParentWorkspace.create, []
            def creating(self, name):
                if len(made_so_far) == {after}: now()
                made_so_far.append(create(self, name))
                return made_so_far[-1]
            place_module.ParentWorkspace.create = creating
            made = coordinator(workspace, dict.fromkeys("ab", forever), store=store)
            asyncio.run(made.fork(specs("a", "b")))
            """,
        )

        async def work() -> None:
            with Workspace(real.root) as workspace:
                assert len(workspace.branches()) == after
                made = await resumed(workspace, fork_id)
                assert made.is_resolved
                assert made.last_merge is None
                assert workspace.branches() == []
                assert made.store.list_all() == []
                (real.root / "free").write_text("x")
                await made.aclose()

        run(work())

    @pytest.mark.parametrize("is_committed", [False, True])
    @pytest.mark.parametrize("is_whole", [False, True])
    def test_at_the_commit_that_decides_a_merge(
        self, real: Mounted, is_committed: bool, is_whole: bool
    ) -> None:
        """Merged, or not begun; never between."""
        fork_id = killed(
            real,
            f"""
            from branching.fs import Branch
            commit = Branch.commit
            def committing(self, **options):
                if options.get("dry_run") or self.name.endswith(".merge"):
                    return commit(self, **options)
                if {is_committed}: commit(self, **options)
                now()
            async def main():
                made = coordinator(workspace, {{"a": writing(won="a"), "b": forever}}, store=store)
                said = [{{"role": "user", "content": "hi"}}]
                await made.fork(specs("a", "b"), parent_history=said)
                if not {is_whole}: (made.parent_path / "own").write_text("parent")
                await until(lambda: not branch_of(made, "a").is_running)
                Branch.commit = committing
                await made.merge_or_select("pick:" + branch_of(made, "a").id)
            asyncio.run(main())
            """,
        )

        async def work() -> None:
            with Workspace(real.root) as workspace:
                assert (real.base / "won").exists() == is_committed
                made = await resumed(workspace, fork_id)
                assert made.is_resolved == is_committed
                if not is_committed:
                    assert made.last_merge is None
                    if not is_whole:
                        with pytest.raises(ConflictError, match="while the merge was completed"):
                            await made.abort_fork()
                    merged = await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                else:
                    assert made.last_merge is not None
                    merged = made.last_merge
                said = [message["content"] for message in merged.history_after_merge]
                assert said == ["hi", "go a", "done"]
                assert workspace.branches() == []
                await made.aclose()

        run(work())
        assert (real.base / "won").read_text() == "a"
        assert (real.base / "own").exists() == (not is_whole)


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("wrote", [False, True])
def test_killed_while_the_fork_is_aborted(real: Mounted, is_committed: bool, wrote: bool) -> None:
    """The parent's own work has landed, or can still land."""
    fork_id = killed(
        real,
        f"""
        from branching.fs import Branch
        ending = "commit" if {wrote} else "abort"
        end = getattr(Branch, ending)
        def dying(self, **options):
            if {is_committed}: end(self, **options)
            now()
        async def main():
            made = coordinator(workspace, {{"a": writing(a="a")}}, store=store)
            await made.fork(specs("a"))
            if {wrote}: (made.parent_path / "own").write_text("parent")
            await all_ended(made)
            setattr(Branch, ending, dying)
            await made.abort_fork()
        asyncio.run(main())
        """,
    )

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = await resumed(workspace, fork_id)
            assert made.is_resolved == is_committed
            assert made.last_merge is None
            if not made.is_resolved:
                await made.abort_fork()
            assert workspace.branches() == []
            await made.aclose()

    run(work())
    assert (real.base / "own").exists() == wrote
    assert not (real.base / "a").exists()


def test_a_fork_can_be_left_to_be_resumed(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            store = SQLiteForkStateStore.beside(workspace)
            made = coordinator(workspace, {"a": writing(a="a"), "b": forever}, store=store)
            await made.fork(specs("a", "b"), parent_history=PARENT)
            await until(lambda: not branch_of(made, "a").is_running)
            await made.detach()
            assert branch_of(made, "b").status.state == "terminated"
            again = await resumed(workspace, made.fork_id or "")
            merged = await again.merge_or_select(f"pick:{branch_of(again, 'a').id}")
            assert merged.applied_paths == ("a",)
            await again.aclose()
            store.close()
            with pytest.raises(ValueError, match="no fork"):
                await resumed(workspace, made.fork_id or "")

    run(work())


def test_a_state_that_cannot_be_saved_is_reported_and_the_runs_go_on() -> None:
    """And it is kept as soon as it can be, although nothing more happens in the fork."""

    class Full(InMemoryForkStateStore):
        is_full = False

        def save(self, state: ForkState) -> None:
            if self.is_full:
                raise ForkStoreError("no space left")
            super().save(state)

    async def work() -> None:
        store = Full()
        go = asyncio.Event()

        async def waits(runner: ScriptedRunner) -> None:
            await go.wait()
            await runner.say("done")

        made = coordinator(None, {"a": waits}, store=store)
        await made.fork(specs("a"))
        store.is_full = True
        go.set()

        async def ends(warned: pytest.WarningsRecorder) -> None:
            # The thread that saves the fork warns, perhaps after the run has ended.
            await until(lambda: len(warned) > 0 and not branch_of(made, "a").is_running)
            assert branch_of(made, "a").status.state == "done"
            store.is_full = False
            await until(lambda: [kept.status.state for kept in saved()] == ["done"])
            await made.aclose()

        def saved() -> list[KeptBranch]:
            return [branch for each in store.list_all() for branch in each.branches]

        with pytest.warns(
            UserWarning, match="would not survive a restart: no space left"
        ) as warned:
            await ends(warned)

    run(work())
