"""An open fork: branches, states, steering, approvals, and its end.

Most of this needs no files and is tested without them; the rest uses a real mount.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import FrozenInstanceError, fields
from functools import partial
from typing import Any

import pytest
from conftest import Mounted
from support.agents import (
    Runners,
    ScriptedRunner,
    all_ended,
    branch_of,
    coordinator,
    forever,
    run,
    runner_of,
    specs,
    until,
    writing,
)

from branching import Branch, BranchingError, MountError, Workspace
from branching.agent.approvals import ApprovalRequest
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkBranchLimitError, ForkDepthLimitError, ForkStateError
from branching.agent.fork_state import ForkState
from branching.agent.fork_store import InMemoryForkStateStore
from branching.agent.parent_workspace import ParentWorkspace
from branching.agent.types import BranchIsolation, BranchSpec, MergeStrategy

HISTORY = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


async def answers(runner: ScriptedRunner) -> None:
    await runner.say(f"answer to {runner.prompts[-1]}")


def _is_answered(branch: BranchRuntime, request: ApprovalRequest) -> bool:
    return request not in branch.approvals.pending()


class TestTypes:
    """The public types: names, fields, defaults."""

    @pytest.mark.contract("B1", "P4")
    def test_a_branch_spec_has_the_documented_fields(self) -> None:
        spec = BranchSpec("a", "go", "some:model", 1.5, "be brief")
        assert (spec.model, spec.budget_usd) == ("some:model", 1.5)
        assert spec.extra_instructions == "be brief"
        assert (BranchSpec("a", "go").model, BranchSpec("a", "go").budget_usd) == (None, None)
        with pytest.raises(FrozenInstanceError):
            spec.label = "b"  # type: ignore[misc]

    @pytest.mark.contract("B2", "B3", "B5")
    def test_isolation_has_the_documented_defaults(self) -> None:
        told = {field.name: field.default for field in fields(BranchIsolation)}
        assert told == {
            "history": "copy",
            "backend": "copy",
            "memory": "copy",
            "todos": "copy",
            "message_queue": "isolated",
            "team_bus": "shared",
        }
        with pytest.raises(ValueError, match="history is always copied"):
            BranchIsolation(history="share")  # type: ignore[arg-type]

    @pytest.mark.contract("B10")
    def test_a_merge_strategy_has_the_documented_defaults(self) -> None:
        strategy = MergeStrategy()
        assert strategy.kind == "auto_with_fallback"
        assert strategy.confidence_threshold == 0.80
        assert strategy.judge_models is None
        assert "haiku" in strategy.judge_model


class _HeldStore(InMemoryForkStateStore):
    """A store whose writes block between two calls of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_waiting = threading.Event()
        self.has_gone_on = False

    def save(self, state: ForkState) -> None:
        if not self.goes_on.is_set():
            self.is_waiting.set()
            self.has_gone_on = self.goes_on.wait(10)
        super().save(state)


class TestFork:
    @pytest.mark.contract("B9", "D1", "D2", "D4", "D5")
    def test_branches_run_concurrently_with_the_parents_history(self) -> None:
        """All are running when `fork` returns; each has a copy of the history, then its prompt."""

        async def work() -> None:
            together = asyncio.Event()
            here: list[str] = []

            async def meets(runner: ScriptedRunner) -> None:
                here.append(runner.branch.spec.label)
                if len(here) == 3:
                    together.set()
                await together.wait()
                runner.messages[0]["content"] += runner.branch.spec.label
                await runner.say("met")

            made = coordinator(None, dict.fromkeys("abc", meets))
            assert made.is_resolved  # before the first fork
            assert made.handle is None
            handle = await made.fork(specs("a", "b", "c"), parent_history=HISTORY)
            assert [branch.state for branch in handle.branches] == ["running"] * 3
            assert list(made.branches) == [branch.id for branch in handle.branches]
            assert handle.merge_strategy == MergeStrategy()
            await all_ended(made)
            for label in "abc":
                said = [message["content"] for message in branch_of(made, label).history]
                assert said == [f"hi{label}", "hello", f"go {label}", "met"]
            assert HISTORY[0]["content"] == "hi"
            assert not made.is_resolved
            await made.aclose()

        run(work())

    @pytest.mark.contract("D4")
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ([], "at least one"),
            ([BranchSpec("", "x")], "needs a label"),
            (specs("a", "a"), "must differ"),
        ],
    )
    def test_invalid_specs_are_refused(self, wrong: list[BranchSpec], error: str) -> None:
        made = coordinator(None, {})
        with pytest.raises(ValueError, match=error):
            run(made.fork(wrong))
        assert made.is_resolved

    @pytest.mark.contract("B24", "D4")
    def test_too_many_branches_and_too_deep_forks_are_refused(self) -> None:
        made = coordinator(None, {}, max_branches=2)
        with pytest.raises(ForkBranchLimitError, match="the maximum is 2"):
            run(made.fork(specs("a", "b", "c")))
        with pytest.raises(ForkDepthLimitError):
            run(coordinator(None, {}, depth=2, max_depth=2).fork(specs("a")))

    def test_a_blocked_disk_delays_no_run(self) -> None:
        """And what was still to be written when the fork ended does not bring it back."""

        async def work() -> None:
            store = _HeldStore()
            made = coordinator(None, dict.fromkeys("ab", answers), store=store)
            await made.fork(specs("a", "b"), parent_history=HISTORY)
            store.goes_on.clear()
            await until(store.is_waiting.is_set)
            await all_ended(made)
            [kept] = store.list_all()
            assert "done" not in [branch.status.state for branch in kept.branches]
            ending = asyncio.create_task(made.abort_fork())
            await asyncio.sleep(0)
            store.goes_on.set()
            await ending
            assert store.has_gone_on, "the loop stood still with the disk"
            assert store.list_all() == []

        run(work())

    @pytest.mark.contract("P15")
    def test_a_second_fork_waits_for_the_end_of_the_first_and_starts_fresh(self) -> None:
        """The second handle lists the new branches only."""

        async def work() -> None:
            made = coordinator(None, dict.fromkeys("abc", answers))
            await made.fork(specs("a", "b"), parent_history=HISTORY)
            with pytest.raises(ForkStateError, match="a fork is open"):
                await made.fork(specs("c"))
            await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
            handle = await made.fork(specs("c"), parent_history=HISTORY)
            assert [branch.label for branch in handle.branches] == ["c"]
            assert [branch.label for branch in made.inspect_branches()] == ["c"]
            await made.aclose()

        run(work())

    def test_a_runner_that_cannot_be_made_leaves_no_branch(self, real: Mounted) -> None:
        def impossible(branch: Any) -> ScriptedRunner:
            if branch.spec.label == "b":
                raise LookupError("no such model")
            return Runners({"a": answers})(branch)

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {})
                made._runner = impossible
                with pytest.raises(LookupError):
                    await made.fork(specs("a", "b"))
                assert workspace.branches() == []
                assert made.is_resolved
                assert made.store.list_all() == []
                (real.root / "not frozen").write_text("x")
                await made.aclose()

        run(work())

    def test_a_fork_that_cannot_be_made_leaves_no_branch(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace, workspace.branch("taken") as outer:
                made = coordinator(outer, {"a": answers})
                with outer.branch("child", None, None):
                    outer.abort()
                with pytest.raises(BranchingError, match="was not made"):
                    await made.fork(specs("a"))
                assert made.is_resolved
                await made.aclose()

        run(work())

    def test_one_that_cannot_be_made_to_its_end_leaves_no_branch(
        self, real: Mounted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        create = ParentWorkspace.create

        def runs_out(place: ParentWorkspace, name: str) -> Branch:
            if name.endswith("-b"):
                raise MountError("no space left")
            return create(place, name)

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, dict.fromkeys("abc", answers))
                monkeypatch.setattr(ParentWorkspace, "create", runs_out)
                with pytest.raises(MountError):
                    await made.fork(specs("a", "b", "c"))
                assert workspace.branches() == []
                assert made.is_resolved
                monkeypatch.undo()
                await made.fork(specs("a"))
                await made.aclose()

        run(work())


class TestStates:
    """The states of branches and how they change."""

    @pytest.mark.contract("B7", "B8", "D15")
    def test_branches_report_done_and_failed(self) -> None:
        async def fails(runner: ScriptedRunner) -> None:
            await runner.say("so far")
            raise KeyError("k")

        async def work() -> None:
            made = coordinator(None, {"a": answers, "b": fails})
            await made.fork(specs("a", "b"), parent_history=HISTORY)
            await all_ended(made)
            good, bad = made.inspect_branches()
            assert (good.state, good.error, good.current_turn) == ("done", None, 2)
            assert good.last_message_preview == "answer to go a"
            assert (bad.state, bad.error) == ("failed", "KeyError: 'k'")
            await made.aclose()

        run(work())

    @pytest.mark.contract("D7")
    def test_a_running_branch_can_be_terminated(self) -> None:
        """Only a running branch is terminated, a second time has no effect, and an unknown id is a
        ValueError."""

        async def work() -> None:
            made = coordinator(None, {"a": forever, "b": answers})
            await made.fork(specs("a", "b"))
            a, b = branch_of(made, "a"), branch_of(made, "b")
            await until(lambda: not b.is_running)
            await made.terminate_branch(b.id)
            assert b.status.state == "done"
            await made.terminate_branch(a.id, ("budget_exhausted", "enough"))
            assert (a.status.state, a.status.error) == ("budget_exhausted", "enough")
            assert a.task is not None
            assert a.task.done()
            assert runner_of(made, "a").stops == 1
            await made.terminate_branch(a.id)
            assert a.status.state == "budget_exhausted"
            with pytest.raises(ValueError, match="no branch 'x'"):
                await made.terminate_branch("x")
            await made.aclose()

        run(work())

    def test_one_stopped_before_its_first_step_is_terminated(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": forever})
            await made.fork(specs("a"))
            branch = branch_of(made, "a")
            assert branch.task is not None
            branch.task.cancel()
            await made.terminate_branch(branch.id)
            assert branch.status.state == "terminated"
            await made.aclose()

        run(work())

    def test_a_runner_that_cannot_stop_says_so_and_is_cancelled_all_the_same(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": forever})
            await made.fork(specs("a"))
            runner = runner_of(made, "a")

            async def broken() -> None:
                raise OSError("no way")

            stop = runner.stop
            runner.stop = broken  # type: ignore[method-assign]
            await made.terminate_branch(runner.branch.id)
            assert runner.branch.status.state == "terminated"
            assert "no way" in (runner.branch.status.error or "")
            with pytest.raises(ForkStateError, match="cannot be stopped: no way"):
                await made.abort_fork()
            assert not made.is_resolved
            runner.stop = stop  # type: ignore[method-assign]
            await made.aclose()

        run(work())

    @pytest.mark.contract("D17")
    def test_a_partial_history_of_an_unknown_branch_is_ignored(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": forever})
            await made.fork(specs("a"))
            made.capture_partial_history("nobody", HISTORY)
            branch = branch_of(made, "a")
            made.capture_partial_history(branch.id, HISTORY)
            assert branch.partial_history == HISTORY
            assert branch.partial_history is not HISTORY
            await made.aclose()

        run(work())


class TestGoingOn:
    """More turns, steering, approvals."""

    @pytest.mark.contract("D6")
    def test_a_finished_branch_can_be_continued(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": answers, "b": answers, "c": forever})
            await made.fork(specs("a", "b", "c"), parent_history=HISTORY)
            a, b, c = made.branches.values()
            await until(lambda: not a.is_running and not b.is_running)
            task = await made.run_on_branch(a.id, "more")
            assert a.is_running
            await task
            assert made.inspect_branches()[0].state == "done"
            said = [message["content"] for message in a.history]
            assert said == ["hi", "hello", "go a", "answer to go a", "more", "answer to more"]
            assert len(b.history) == 4
            with pytest.raises(ValueError, match="no branch"):
                await made.run_on_branch("x", "more")
            with pytest.raises(RuntimeError, match="is running"):
                await made.run_on_branch(c.id, "more")
            merged = await made.merge_or_select(f"pick:{a.id}")
            assert len(merged.history_after_merge) == 6  # the turns it went on for too
            await made.aclose()

        run(work())

    def test_a_turn_that_is_stopped_loses_no_earlier_one(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": answers})
            await made.fork(specs("a"), parent_history=HISTORY)
            await all_ended(made)
            branch = branch_of(made, "a")

            async def hangs(runner: ScriptedRunner) -> None:
                await asyncio.Event().wait()

            runner_of(made, "a")._script = hangs
            await made.run_on_branch(branch.id, "more")
            await made.terminate_branch(branch.id)
            merged = await made.merge_or_select(f"pick:{branch.id}")
            assert merged.history_after_merge[-1]["content"] == "answer to go a"
            await made.aclose()

        run(work())

    def test_a_running_branch_is_steered(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": forever, "b": answers})
            await made.fork(specs("a", "b"))
            a, b = branch_of(made, "a"), branch_of(made, "b")
            await until(lambda: not b.is_running)
            made.steer(a.id, "to the left")
            assert runner_of(made, "a").controlled == ["to the left"]
            with pytest.raises(ForkStateError, match="cannot receive messages"):
                made.steer(b.id, "too late")
            await made.aclose()

        run(work())

    @pytest.mark.contract("D8", "D9")
    def test_an_approval_suspends_the_run_and_a_denial_is_recorded(self) -> None:
        async def work() -> None:
            got: list[str] = []

            async def asks(runner: ScriptedRunner) -> None:
                for command in ("ls", "rm -rf /"):
                    got.append(await runner.branch.ask("shell", command, cwd="."))
                await runner.say("asked")

            made = coordinator(None, {"a": asks})
            await made.fork(specs("a"))
            branch = branch_of(made, "a")
            for answer in ("approve", "deny"):
                await until(made.iter_pending_approvals)
                [(asker, request)] = made.iter_pending_approvals()
                assert asker == branch.id
                assert request.facts == {"cwd": "."}
                assert branch.is_running
                made.answer(branch.id, request, "approve" if answer == "approve" else "deny")
                await until(partial(_is_answered, branch, request))
                with pytest.raises(ValueError, match="does not ask"):
                    made.answer(branch.id, request, "approve")
            await all_ended(made)
            assert got == ["approve", "deny"]
            merged = await made.merge_or_select(f"pick:{branch.id}")
            assert merged.blocked_commands == ("shell rm -rf /",)
            assert "denied: shell rm -rf /" in merged.notice
            await made.aclose()

        run(work())

    @pytest.mark.contract("D8")
    def test_an_approval_request_ends_with_its_run(self) -> None:
        async def work() -> None:
            async def asks(runner: ScriptedRunner) -> None:
                await runner.branch.ask("shell", "ls")

            made = coordinator(None, {"a": asks})
            await made.fork(specs("a"))
            await until(made.iter_pending_approvals)
            await made.terminate_branch(branch_of(made, "a").id)
            assert made.iter_pending_approvals() == []
            await made.aclose()

        run(work())


class TestEnd:
    """How a fork ends without a merge."""

    @pytest.mark.contract("D13")
    def test_an_aborted_fork_keeps_the_parents_own_changes(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(a="a"), "b": forever})
                handle = await made.fork(specs("a", "b"))
                assert made.parent_path not in (None, real.root)
                assert made.parent_path is not None
                (made.parent_path / "own").write_text("parent's")
                assert await made.abort_fork() == [branch.id for branch in handle.branches]
                assert made.is_resolved
                assert made.parent_path == real.root
                assert (real.base / "own").read_text() == "parent's"
                assert not (real.base / "a").exists()
                assert workspace.branches() == []
                with pytest.raises(ForkStateError, match="is over"):
                    await made.abort_fork()
                await made.fork(specs("a"))
                await made.aclose()

        run(work())

    @pytest.mark.contract("D3", "D18", "P7")
    def test_a_closed_coordinator_is_resolved(self, real: Mounted) -> None:
        """It can be closed twice."""

        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": forever})
                await made.fork(specs("a"))
                branch = branch_of(made, "a")
                await made.aclose()
                assert made.is_resolved
                assert branch.status.state == "terminated"
                assert workspace.branches() == []
                await made.aclose()

        run(work())

    @pytest.mark.contract("D10")
    def test_unknown_merge_actions_are_refused(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": forever})
            with pytest.raises(ValueError, match="no branch"):
                await made.merge_or_select("pick:x")
            await made.fork(specs("a"))
            refused = r"unknown action .*; use pick:<branch id>|no branch"
            for action in ("keep:x", "pick", "abort"):
                with pytest.raises(ValueError, match=refused):
                    await made.merge_or_select(action)
            await made.aclose()

        run(work())

    @pytest.mark.contract("D16")
    def test_fork_cost_before_a_fork_is_an_error(self) -> None:
        with pytest.raises(RuntimeError, match="nothing was forked"):
            coordinator(None, {}).fork_cost()


@pytest.mark.contract("B2")
class TestSharedFiles:
    """Without a workspace, or by the isolation settings, branches share the files."""

    def test_without_a_workspace_only_the_conversation_is_merged(self) -> None:
        async def work() -> None:
            made = coordinator(None, {"a": answers})
            await made.fork(specs("a"))
            await all_ended(made)
            branch = branch_of(made, "a")
            assert (branch.path, branch.overlay, made.parent_path) == (None, None, None)
            report = await made.diff_branches()
            assert report.paths == ()
            merged = await made.merge_or_select(f"pick:{branch.id}")
            assert merged.applied_paths == ()
            await made.aclose()

        run(work())

    def test_share_writes_where_the_parent_works(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(shared="x")})
                await made.fork(specs("a"), isolation=BranchIsolation(backend="share"))
                await all_ended(made)
                assert branch_of(made, "a").path == made.parent_path
                await made.merge_or_select(f"pick:{branch_of(made, 'a').id}")
                await made.aclose()

        run(work())
        assert (real.base / "shared").read_text() == "x"

    def test_share_readonly_reads_what_was_forked(self, real: Mounted) -> None:
        async def work() -> None:
            with Workspace(real.root) as workspace:
                made = coordinator(workspace, {"a": writing(shared="x")})
                await made.fork(specs("a"), isolation=BranchIsolation(backend="share_readonly"))
                await all_ended(made)
                assert branch_of(made, "a").status.state == "failed"
                assert "Read-only" in (branch_of(made, "a").status.error or "")
                await made.aclose()

        run(work())
        assert not (real.base / "shared").exists()


@pytest.mark.contract("A5")
def test_two_coordinators_share_nothing() -> None:
    async def work() -> None:
        one, two = (coordinator(None, {"a": answers}) for _ in range(2))
        await asyncio.gather(one.fork(specs("a")), two.fork(specs("a")))
        assert one.fork_id != two.fork_id
        assert set(one.branches).isdisjoint(two.branches)
        assert {state.fork_id for state in one.store.list_all()} <= {one.fork_id}
        for made in (one, two):
            await made.aclose()

    run(work())


@pytest.mark.contract("I2")
def test_a_missing_checkpoint_store_is_a_warning() -> None:
    async def work() -> None:
        made = ForkCoordinator(runner=Runners({"a": answers}))
        with pytest.warns(UserWarning, match="no checkpoint store"):
            handle = await made.fork(specs("a"))
        assert handle.parent_checkpoint_id is None
        await made.aclose()

    run(work())
