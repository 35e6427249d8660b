"""Names and calls of the published documents of live run forking, as they are written there."""

from __future__ import annotations

import importlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic_ai.models.test import TestModel
from support.agents import (
    Runners,
    all_ended,
    branch_of,
    coordinator,
    forever,
    run,
    specs,
    until,
    writing,
)

from branching import Workspace, _difftool
from branching.agent import types
from branching.agent.branch_files import BranchFiles
from branching.agent.branch_runtime import BranchRuntime
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.errors import ForkStateError
from branching.agent.judge import JudgeError
from branching.agent.protocols import Judgement, Question
from branching.agent.pydantic_ai import ForkMaterializer, create_fork_toolset
from branching.agent.types import (
    BranchDiffReport,
    BranchIsolation,
    BranchOutcome,
    BranchStatus,
    ConfidenceSignals,
    DiffSummary,
    MergeStrategy,
)

HISTORY = [{"role": "user", "content": "hi"}]


def published(name: str) -> Any:
    """The object of that name, from where a user imports it."""
    module = importlib.import_module("branching.agent.pydantic_ai")
    assert name in module.__all__
    return getattr(module, name)


def test_a_branch_overlay_is_the_type_of_a_branchs_files() -> None:
    assert published("BranchOverlay") is BranchFiles


def test_the_literals_of_a_diff_have_the_documented_values() -> None:
    assert get_args(published("BranchDiffOperation")) == (
        "created",
        "modified",
        "deleted",
        "untouched",
    )
    assert set(get_args(published("BranchDiffAgreement"))) == {
        "unanimous_change",
        "unanimous_no_change",
        "split",
        "unique",
    }


@pytest.mark.parametrize(
    "name",
    [
        "BranchChange",
        "BranchCost",
        "BranchOutcome",
        "BranchState",
        "ConfidenceSignals",
        "DiffSummary",
        "EditorDetector",
        "FileChange",
        "FlushError",
        "FlushReport",
        "PathDiff",
    ],
)
def test_the_documented_types_are_names_of_the_package(name: str) -> None:
    package = importlib.import_module("branching.agent")
    assert name in package.__all__
    assert getattr(package, name) is getattr(_difftool if name == "EditorDetector" else types, name)


def test_clone_for_branch_copies_dependencies() -> None:
    class Deps:
        todos = ("milk",)

    deps = Deps()
    own = published("clone_for_branch")(deps, BranchIsolation())
    assert (own.todos, deps.todos) == ((), ("milk",))


@pytest.mark.parametrize(
    ("ratio", "judged", "expected"),
    [(1.0, 0.5, 0.4), (None, 1.0, 0.6), (0.0, 1.0, 0.6)],
    ids=["tested", "untested", "failed"],
)
def test_compute_confidence_has_the_documented_formula(
    ratio: float | None, judged: float, expected: float
) -> None:
    signals = ConfidenceSignals(
        quality_spread=0.5 if ratio else 1.0, test_pass_ratio=ratio, internal_consistency=1.0
    )
    assert published("compute_confidence")(signals, judged) == pytest.approx(expected)


def test_compute_confidence_is_limited_without_tests() -> None:
    signals = ConfidenceSignals(quality_spread=2.0, test_pass_ratio=None, internal_consistency=1.0)
    assert published("compute_confidence")(signals, 1.0) == pytest.approx(0.65)


def _case() -> tuple[str, BranchDiffReport, list[BranchOutcome]]:
    summary = DiffSummary(
        total_paths_touched=0,
        unanimous_paths=0,
        split_paths=0,
        per_branch_unique={},
        agreement_score=1.0,
    )
    outcomes = [
        BranchOutcome(
            branch_id=name,
            label=name,
            state="done",
            final_message="made it",
            cost_usd=None,
            turns=1,
            error_count=0,
        )
        for name in ("one", "two")
    ]
    return "the goal", BranchDiffReport(fork_id="f", paths=(), summary=summary), outcomes


def test_a_judge_agent_returns_a_verdict_and_its_usage() -> None:
    model = TestModel(custom_output_args={"winner_branch_id": "two", "confidence": 0.5})
    verdict, usage = run(published("JudgeAgent")(model).evaluate(*_case()))
    assert (verdict.winner_branch_id, verdict.confidence) == ("two", 0.5)
    assert usage.requests == 1


def test_a_judge_agent_refuses_a_verdict_for_no_branch_of_the_fork() -> None:
    model = TestModel(custom_output_args={"winner_branch_id": "three", "confidence": 0.5})
    with pytest.raises(JudgeError, match="'three'"):
        run(published("JudgeAgent")(model).evaluate(*_case()))


def test_a_branch_of_a_handle_stands_for_its_id_in_a_text() -> None:
    """`merge_or_select(f"pick:{handle.branches[0]}")`."""

    async def work() -> str:
        made = coordinator(None, {"a": lambda runner: runner.say("done")})
        handle = await made.fork(specs("a"), parent_history=HISTORY)
        await all_ended(made)
        result = await made.merge_or_select(f"pick:{handle.branches[0]}")
        assert result.winner_branch_id == handle.branches[0].id
        return repr(handle.branches[0])

    assert run(work()).startswith("BranchStatus("), "the representation still has all fields"


def test_the_text_of_a_status_is_the_id() -> None:
    moment = datetime.now(timezone.utc)
    assert str(BranchStatus(id="x-0", label="a", state="done", last_activity_at=moment)) == "x-0"


def test_a_reason_to_terminate_a_branch_can_be_a_text() -> None:
    async def work() -> None:
        made = coordinator(None, {"a": forever})
        await made.fork(specs("a"), parent_history=HISTORY)
        branch = branch_of(made, "a")
        await until(lambda: branch.partial_history is not None)
        await made.terminate_branch(branch.id, reason="not needed any more")
        assert branch.status.state == "terminated"
        assert branch.status.error == "not needed any more"
        await made.aclose()

    run(work())


def test_a_coordinator_runs_the_test_command_in_each_branch(real_workspace: Workspace) -> None:
    seen: list[float | None] = []

    async def judge(question: Question) -> Judgement:
        seen.extend(outcome.test_pass_ratio for outcome in question.outcomes)
        raise ForkStateError("only the outcomes are of interest")

    async def work() -> None:
        made = ForkCoordinator(
            runner=Runners({"good": writing(passes="yes"), "bad": writing(other="no")}),
            place=real_workspace,
            checkpoint_store=InMemoryCheckpointStore(),
            judge=judge,
            test_command="test -e passes",
            test_timeout_s=30.0,
        )
        await made.fork(specs("good", "bad"), parent_history=HISTORY)
        with pytest.raises(ForkStateError):
            await made.resolve(MergeStrategy(kind="auto"))
        await made.aclose()

    run(work())
    assert seen == [1.0, 0.0]


def test_the_toolset_and_the_materializer_have_their_published_names(tmp_path: Path) -> None:
    assert sorted(create_fork_toolset().tools) == [
        "delete_file",
        "diff_branches",
        "fork_cost",
        "fork_run",
        "inspect_branches",
        "merge_or_select",
        "terminate_branch",
    ]
    materializer = ForkMaterializer(tmp_path, "f1")
    materializer.refresh([])
    assert (tmp_path / ".pydantic-deep" / "forks" / "f1" / "manifest.json").exists()


def test_a_test_command_beside_a_tester_is_refused(tmp_path: Path) -> None:
    async def tester(branch: BranchRuntime) -> float | None:
        return None

    with pytest.raises(ValueError, match="test_command"):
        ForkCoordinator(runner=Runners({}), tester=tester, test_command=f"test -d {tmp_path}")
