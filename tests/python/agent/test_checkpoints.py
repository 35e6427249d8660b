"""Checkpoints outlive the process, and so does an interrupted rewind."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from textwrap import dedent

import pytest
from conftest import Mounted
from support.agents import (
    Runners,
    all_ended,
    branch_of,
    coordinator,
    died,
    run,
    specs,
    writing,
)

from branching import Branch, CommitError, Workspace
from branching.agent.checkpoint import Checkpoint, InMemoryCheckpointStore, TreeMark
from branching.agent.checkpoint_store import SQLiteCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError, ForkStoreError
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.parent_workspace import HISTORY_COMMITS
from branching.agent.protocols import CheckpointStore

PARENT = [{"role": "user", "content": "hi"}]
SEED = "seed.txt"


def checkpoint(name: str, tree: TreeMark | None = None) -> Checkpoint:
    moment = datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)
    return Checkpoint(
        id=name, label=f"l {name}", created_at=moment, history=b'["\xc3\xa9"]', tree=tree, turn=3
    )


MARKS = [
    None,
    TreeMark(commit_id=0),
    TreeMark(commit_id=7),
    TreeMark(branch="session", archive=b"\0\xff"),
    TreeMark(branch="session", archive=b""),
]


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, place: Path) -> Iterator[CheckpointStore]:
    if request.param == "memory":
        yield InMemoryCheckpointStore(2)
        return
    opened = SQLiteCheckpointStore(place / "agents" / "forks.sqlite", 2)
    yield opened
    opened.close()


class TestStore:
    """Both stores behave the same."""

    @pytest.mark.parametrize("tree", MARKS, ids=repr)
    def test_saved_state_is_read_back_complete(
        self, store: CheckpointStore, tree: TreeMark | None
    ) -> None:
        store.save(checkpoint("a", tree))
        assert store.get("a") == checkpoint("a", tree)
        assert store.list_all() == [checkpoint("a", tree)]
        assert store.get("b") is None

    @pytest.mark.contract("I3")
    def test_the_oldest_checkpoints_of_a_workspace_are_pruned_first(
        self, store: CheckpointStore
    ) -> None:
        session = TreeMark(branch="session", archive=b"x")
        kept = [
            checkpoint("a", session),
            *(checkpoint(name, TreeMark(commit_id=1)) for name in "bcd"),
        ]
        for one in kept:
            store.save(one)
        assert [one.id for one in store.list_all()] == ["a", "c", "d"]
        store.save(kept[2])
        assert [one.id for one in store.list_all()] == ["a", "d", "c"]
        newest = store.newest(None), store.newest("session"), store.newest("nobody")
        assert [one and one.id for one in newest] == ["c", "a", None]
        store.remove("c")
        store.remove("c")
        assert [one.id for one in store.list_all()] == ["a", "d"]

    def test_another_connection_sees_them(self, place: Path) -> None:
        path = place / "forks.sqlite"
        one, other = SQLiteCheckpointStore(path), SQLiteCheckpointStore(path)
        one.save(checkpoint("a"))
        assert other.get("a") == checkpoint("a")
        one.close()
        other.close()

    def test_forks_and_checkpoints_are_in_one_file(self, real: Mounted) -> None:
        with Workspace(real.root) as workspace:
            forks = SQLiteForkStateStore.beside(workspace)
            checkpoints = SQLiteCheckpointStore.beside(workspace)
            checkpoints.save(checkpoint("a"))
            assert forks.list_all() == []
            forks.close()
            checkpoints.close()

    def test_a_file_that_is_none_is_an_error(self, place: Path) -> None:
        path = place / "forks.sqlite"
        path.write_bytes(b"no database at all, but long enough to be looked at" * 50)
        with pytest.raises(ForkStoreError, match="cannot be opened"):
            SQLiteCheckpointStore(path)


def files(top: Path) -> dict[str, str]:
    return {
        str(path.relative_to(top)): path.read_text()
        for path in sorted(top.rglob("*"))
        if path.is_file() and not str(path.relative_to(top)).startswith((".branching", "@"))
    }


def taken_up(workspace: Workspace, place: Workspace | Branch) -> ForkCoordinator:
    """A coordinator of another process: it knows what the store knows."""
    return coordinator(
        place,
        {"a": writing(**{SEED: "later"})},
        store=SQLiteForkStateStore.beside(workspace),
        checkpoint_store=SQLiteCheckpointStore.beside(workspace),
    )


def checkpoint_id(made: ForkCoordinator, label: str) -> str:
    """The first checkpoint with a label that begins so."""
    store = made.checkpoint_manager.store
    assert store is not None
    return next(one.id for one in store.list_all() if one.label.startswith(label))


TWO_MERGES = """
    async def merges(place):
        scripts = {"a": writing(**{"seed.txt": "1"}), "b": writing(**{"seed.txt": "2", "b": "b"})}
        made = coordinator(place, scripts, store=store, checkpoint_store=checkpoints)
        history = [{"role": "user", "content": "hi"}]
        for label in "ab":
            await made.fork(specs(label), parent_history=history)
            await all_ended(made)
            merged = await made.merge_or_select("pick:" + branch_of(made, label).id)
            history = merged.history_after_merge
        return made
    def target(made):
        return made.checkpoint_manager.store.list_all()[0].id
    session = workspace.branch("session", None, None)
    place = session.__enter__() if IN_BRANCH else workspace
    def dies(owner, name, number, after):
        step, calls = getattr(owner, name), []
        def dying(*arguments, **options):
            calls.append(None)
            if len(calls) != number: return step(*arguments, **options)
            if after: step(*arguments, **options)
            now()
        setattr(owner, name, dying)
"""


def killed(real: Mounted, in_branch: bool, script: str) -> None:
    """See `died`; `place` is a branch, or main."""
    died(real.root, f"IN_BRANCH = {in_branch}\n" + dedent(TWO_MERGES) + dedent(script))


MOMENTS = [
    (False, "Workspace", "undo", 1, False),
    (False, "Workspace", "undo", 1, True),
    (False, "Workspace", "undo", 2, False),
    (False, "Workspace", "undo", 2, True),
    (True, "Workspace", "load", 1, True),
    (True, "place_module.ParentWorkspace", "create", 1, True),
    (True, "place_module.TreeCopier", "make", 2, False),
    (True, "Branch", "commit", 1, False),
    (True, "Branch", "commit", 1, True),
    (True, "Branch", "abort", 1, True),
    (False, "SQLiteCheckpointStore", "save", 1, False),
    (False, "SQLiteCheckpointStore", "save", 1, True),
    (True, "SQLiteCheckpointStore", "save", 2, False),
    (True, "SQLiteCheckpointStore", "save", 2, True),
]


@pytest.mark.slow
@pytest.mark.contract("L15")
@pytest.mark.parametrize(
    ("in_branch", "owner", "step", "number", "after"),
    MOMENTS,
    ids=["-".join(map(str, moment)) for moment in MOMENTS],
)
def test_killed_in_the_middle_of_a_rewind(
    real: Mounted, in_branch: bool, owner: str, step: str, number: int, after: bool
) -> None:
    """A rewind that was begun is known as long as it is not done; it can be ended either way."""
    killed(
        real,
        in_branch,
        f"""
        from branching import Branch
        async def main():
            made = await merges(place)
            dies({owner}, {step!r}, {number}, {after})
            await made.rewind(target(made))
        asyncio.run(main())
        """,
    )
    begun = (step, number, after) != ("save", 1, False)
    done = (step, number, after) == ("save", 2, True)

    async def work() -> None:
        with Workspace(real.root) as workspace:
            place = workspace.reopen("session") if in_branch else workspace
            top = place.path
            made = taken_up(workspace, place)
            target = checkpoint_id(made, "fork:")
            assert await made.cut_off_rewind() == (target if begun and not done else None)
            if begun and not done:
                with pytest.raises(ForkStateError, match="died during a rewind"):
                    await made.fork(specs("a"))
            assert await made.rewind(target) == PARENT
            assert await made.cut_off_rewind() is None
            assert files(top) == {SEED: "seed\n"}
            before = checkpoint_id(made, "before-rewind:")
            said = [message["content"] for message in await made.rewind(before)]
            assert files(top) == {SEED: "2", "b": "b"}
            assert said == (["hi", "go a", "done", "go b", "done"] if begun else [])
            left = [record.name for record in workspace.branches()]
            assert left == (["session"] if in_branch else [])
            await made.aclose()
            if isinstance(place, Branch):
                place.abort()

    run(work())


@pytest.mark.parametrize(
    ("owner", "step", "after"),
    [
        ("SQLiteCheckpointStore", "save", False),
        ("SQLiteCheckpointStore", "save", True),
        ("SQLiteForkStateStore", "remove", False),
        ("SQLiteForkStateStore", "remove", True),
    ],
)
def test_killed_between_the_merge_of_the_files_and_its_end(
    real: Mounted, owner: str, step: str, after: bool
) -> None:
    """The winner's conversation is never lost: it is with the fork, or a checkpoint."""
    killed(
        real,
        False,
        f"""
        async def main():
            made = coordinator(
                workspace, {{"a": writing(a="a")}}, store=store, checkpoint_store=checkpoints
            )
            await made.fork(specs("a"), parent_history=[{{"role": "user", "content": "hi"}}])
            await all_ended(made)
            dies({owner}, {step!r}, 1, {after})
            await made.merge_or_select("pick:" + branch_of(made, "a").id)
        asyncio.run(main())
        """,
    )

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = taken_up(workspace, workspace)
            if forks := made.store.list_all():
                again = await ForkCoordinator.resume(
                    forks[0].fork_id,
                    store=made.store,
                    runner=Runners({"a": writing(a="a")}),
                    place=workspace,
                    checkpoint_store=made.checkpoint_manager.store,
                )
                assert again.is_resolved
                assert again.last_merge is not None
                await again.aclose()
            assert made.store.list_all() == []
            history = await made.rewind(checkpoint_id(made, "post-fork:"))
            assert [message["content"] for message in history] == ["hi", "go a", "done"]
            assert files(real.root) == {SEED: "seed\n", "a": "a"}
            assert await made.rewind(checkpoint_id(made, "fork:")) == PARENT
            assert files(real.root) == {SEED: "seed\n"}
            await made.aclose()

    run(work())


def test_killed_while_the_checkpoint_of_a_fork_is_kept(real: Mounted) -> None:
    """The fork is dropped; the checkpoint is there, or not, and leads nowhere else."""
    killed(
        real,
        False,
        """
        made = coordinator(workspace, {"a": forever}, store=store, checkpoint_store=checkpoints)
        dies(SQLiteCheckpointStore, "save", 1, True)
        asyncio.run(made.fork(specs("a"), parent_history=[{"role": "user", "content": "hi"}]))
        """,
    )

    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = taken_up(workspace, workspace)
            [fork] = made.store.list_all()
            again = await ForkCoordinator.resume(
                fork.fork_id,
                store=made.store,
                runner=Runners({"a": writing(a="a")}),
                place=workspace,
                checkpoint_store=made.checkpoint_manager.store,
            )
            assert again.is_resolved
            assert workspace.branches() == []
            assert await again.rewind(checkpoint_id(again, "fork:")) == PARENT
            await again.aclose()

    run(work())


def test_a_rewind_that_is_refused_is_not_taken_for_one_that_was_cut_off(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            made = taken_up(workspace, workspace)
            await made.fork(specs("a"), parent_history=PARENT)
            await all_ended(made)
            await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
            target = checkpoint_id(made, "fork:")
            for number in range(HISTORY_COMMITS):
                with workspace.branch(f"other-{number}") as other:
                    (other.path / "other").write_text(str(number))
            with pytest.raises(CommitError, match="does not reach that far back"):
                await made.rewind(target)
            assert await made.cut_off_rewind() is None
            assert files(real.root) == {SEED: "later", "other": str(HISTORY_COMMITS - 1)}
            await made.aclose()

    run(work())
