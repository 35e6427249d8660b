"""`branching prune` deletes the unused state of agents, and keeps what is still needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import Mounted
from support.agents import all_ended, coordinator, forever, run, specs, writing
from support.command import branching

from branching import Workspace
from branching.agent.branch_runtime import now
from branching.agent.checkpoint import REWINDING, Checkpoint, InMemoryCheckpointStore, TreeMark
from branching.agent.checkpoint_store import SQLiteCheckpointStore
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.merge_override import kept
from branching.agent.pruning import prune
from branching.agent.types import MergeStrategy

from .test_rewind import Picking


def checkpoint(name: str, branch: str | None, label: str = "x") -> Checkpoint:
    archive = None if branch is None else b"x" * 100_000
    tree = TreeMark(branch=branch, archive=archive, commit_id=None if branch else 0)
    return Checkpoint(id=name, label=label, created_at=now(), history=b"[]", tree=tree)


def database_bytes(workspace: Workspace) -> int:
    assert workspace.store is not None
    return sum(path.stat().st_size for path in (workspace.store / "agents").glob("forks*"))


def test_open_forks_stay_and_the_others_are_pruned(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace, workspace.branch("session", None) as session:
            forks = SQLiteForkStateStore.beside(workspace)
            checkpoints = SQLiteCheckpointStore.beside(workspace)
            checkpoints.save(checkpoint("of main", None))
            checkpoints.save(checkpoint("of the session", "session"))
            checkpoints.save(checkpoint("of nobody", "gone"))
            scripts = {"a": writing(a="a"), "b": writing(b="b")}
            options: dict[str, Any] = {"store": forks, "checkpoint_store": checkpoints}
            merged = coordinator(session, scripts, judge=Picking("a"), **options)
            await merged.fork(specs("a", "b"))
            await all_ended(merged)
            await merged.resolve(MergeStrategy(kind="auto"))
            opened = coordinator(workspace, {"a": forever}, **options)
            handle = await opened.fork(specs("a"))
            checkpoints.save(checkpoint("cut off", None, f"{REWINDING}x"))
            assert forks.home is not None
            assert prune(workspace) == 2  # of main, of nobody
            names = [one.label for one in checkpoints.list_all()]
            ids = {one.id for one in checkpoints.list_all()}
            assert {"cut off", "of the session", handle.parent_checkpoint_id} <= ids
            assert f"post-fork:{merged.fork_id}" in names
            assert [fork_id for fork_id, _ in kept(forks.home)] == [merged.fork_id]
            await opened.aclose()
            await merged.aclose()
            session.abort()
            before = database_bytes(workspace)
            assert prune(workspace) == 5  # the override, and four checkpoints
            assert list(kept(forks.home)) == []
            assert forks.list_all() == []
            assert [one.id for one in checkpoints.list_all()] == ["cut off"]
            assert database_bytes(workspace) < before
            forks.close()
            checkpoints.close()

    run(work())


def test_a_fork_whose_branches_were_dropped_by_hand_is_forgotten(real: Mounted) -> None:
    async def work() -> None:
        with Workspace(real.root) as workspace:
            forks = SQLiteForkStateStore.beside(workspace)
            made = coordinator(
                workspace,
                {"a": writing(a="a")},
                store=forks,
                checkpoint_store=InMemoryCheckpointStore(),
            )
            await made.fork(specs("a"))
            await all_ended(made)
            await made.detach()
            assert prune(workspace) == 0
            assert len(forks.list_all()) == 1
            for record in workspace.branches():
                workspace.reopen(record.name).abort()
            assert prune(workspace) == 1
            assert forks.list_all() == []
            forks.close()

    run(work())


def test_the_command_does_it(real: Mounted) -> None:
    with Workspace(real.root) as workspace:
        checkpoints = SQLiteCheckpointStore.beside(workspace)
        checkpoints.save(checkpoint("of main", None))
        assert branching(real.root, "prune", "--keep", "1").code == 0
        assert len(checkpoints.list_all()) == 1
        assert branching(real.root, "prune").code == 0
        assert checkpoints.list_all() == []
        checkpoints.close()


def test_a_workspace_without_agents_is_left_alone(real: Mounted) -> None:
    with Workspace(real.root) as workspace:
        assert prune(workspace) == 0
        assert workspace.store is not None
        assert not Path(workspace.store, "agents").exists()
