"""The judges of a fork: their prompts, verdicts and confidence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from branching.agent.confidence import Confidence, internal_consistency, quality_spread
from branching.agent.judge import (
    PROMPT_CHARACTERS_MAX,
    Choice,
    JudgeCase,
    JudgeError,
    Opinion,
    Panel,
    SingleJudge,
    cycled,
    judge_prompt,
    majority,
    vote,
    vote_models,
)
from branching.agent.protocols import Judgement, Question
from branching.agent.types import (
    BranchDiffReport,
    BranchOutcome,
    ConfidenceSignals,
    DiffSummary,
    MergeKind,
    MergeStrategy,
    Usage,
)


def outcome(branch_id: str, *, message: str = "done", tests: float | None = None) -> BranchOutcome:
    return BranchOutcome(
        branch_id=branch_id,
        label=f"label-{branch_id}",
        state="done",
        final_message=message,
        cost_usd=0.5,
        turns=4,
        error_count=0,
        retry_count=1,
        test_pass_ratio=tests,
    )


def question(
    *outcomes: BranchOutcome,
    kind: MergeKind = "auto",
    agreement: float = 0.25,
    goal: str = "the goal",
    judge_models: Sequence[str] | None = None,
) -> Question:
    summary = DiffSummary(
        total_paths_touched=4,
        unanimous_paths=1,
        split_paths=3,
        per_branch_unique={},
        agreement_score=agreement,
    )
    return Question(
        goal=goal,
        report=BranchDiffReport(fork_id="f", paths=(), summary=summary),
        outcomes=outcomes or (outcome("a", tests=1.0), outcome("b")),
        strategy=MergeStrategy(kind=kind, judge_models=judge_models),
    )


def ask(panel: Panel, asked: Question) -> Judgement:
    return asyncio.run(panel(asked))


def saying(choice: Choice, usage: Usage = Usage()) -> SingleJudge:  # noqa: B008
    return lambda case: Opinion(verdict=choice, usage=usage)


def failing(_: JudgeCase) -> Choice:
    raise RuntimeError("the model is away")


def choice(branch_id: str, confidence: float = 1.0, reasoning: str = "") -> Choice:
    return Choice(winner_branch_id=branch_id, confidence=confidence, reasoning=reasoning)


@pytest.mark.contract("B21", "G6", "G7", "G8")
def test_the_heuristic_is_the_documented_sum() -> None:
    signals = ConfidenceSignals(quality_spread=0.75, test_pass_ratio=0.5, internal_consistency=0.25)
    assert Confidence().heuristic(signals) == pytest.approx(0.4 * 0.75 + 0.4 * 0.5 + 0.2 * 0.25)
    assert quality_spread(0.25) == 0.75
    assert internal_consistency(4, 1, 1) == 0.5
    assert internal_consistency(0, 3, 0) == 0.0


@pytest.mark.contract("G9")
def test_the_heuristic_is_capped_without_tests() -> None:
    signals = ConfidenceSignals(quality_spread=1.0, test_pass_ratio=None, internal_consistency=1.0)
    assert Confidence().heuristic(signals) == pytest.approx(0.6)
    heavy = Confidence(weights={"quality_spread": 0.9})
    assert heavy.heuristic(signals) == 0.65


@pytest.mark.contract("G10")
def test_effective_confidence_is_a_product_between_0_and_1() -> None:
    judged = ask(Panel(saying(choice("a", 0.5))), question())
    assert judged.signals is not None
    assert judged.signals.test_pass_ratio == 1.0
    assert judged.effective_confidence == pytest.approx((0.4 * 0.75 + 0.4 + 0.2 * 0.75) * 0.5)
    assert Confidence(formula=lambda signals, judged: 7.0).effective(judged.signals, 1.0) == 1.0


@pytest.mark.contract("G11")
def test_branches_that_agree_never_reach_the_default_threshold() -> None:
    signals = ConfidenceSignals(quality_spread=0.0, test_pass_ratio=1.0, internal_consistency=1.0)
    assert Confidence().effective(signals, 1.0) == pytest.approx(0.6)
    assert MergeStrategy().confidence_threshold == 0.80


@pytest.mark.contract("L16")
def test_custom_signals_count() -> None:
    confidence = Confidence(
        weights={"brevity": 1.0},
        signals={"brevity": lambda winner: 1.0 if len(winner.final_message) < 10 else 0.0},
        untested_max=1.0,
    )
    panel = Panel(saying(choice("b")), confidence=confidence)
    judged = ask(panel, question(outcome("a"), outcome("b")))
    assert judged.effective_confidence == 1.0
    assert judged.signals is not None
    assert judged.signals.custom == {"brevity": 1.0}
    with pytest.raises(ValueError, match="unknown signals"):
        Confidence(weights={"taste": 1.0})


@pytest.mark.contract("G13")
def test_the_judges_prompt_has_goal_diff_and_branches_and_is_bounded() -> None:
    shown: list[str] = []

    def judge(case: JudgeCase) -> str:
        shown.append(case.prompt)
        return "a"

    ask(Panel(judge), question())
    assert "the goal" in shown[0]
    assert "id a, label label-a: done, 4 turns, cost $0.5000" in shown[0]
    assert "4 paths touched" in shown[0]
    many = [outcome(str(number), message="word " * 500) for number in range(100)]
    ask(Panel(judge), question(*many, outcome("a"), goal="g" * 90_000))
    assert len(shown[1]) <= PROMPT_CHARACTERS_MAX
    assert "characters left out" in shown[1]


@pytest.mark.contract("L16")
def test_the_judges_prompt_can_be_replaced() -> None:
    shown: list[str] = []

    def judge(case: JudgeCase) -> str:
        shown.append(case.prompt)
        return "b"

    ask(Panel(judge, prompt=lambda goal, diff, outcomes: f"For lawyers: {goal}"), question())
    assert shown == ["For lawyers: the goal"]
    assert len(judge_prompt("", "", "", lambda *_: "x" * 90_000)) == PROMPT_CHARACTERS_MAX


@pytest.mark.contract("G14")
@pytest.mark.parametrize(
    "answer",
    [choice("nobody"), choice("a", 1.5), choice("a", float("nan")), "b-ish", None, 7],
    ids=str,
)
def test_an_invalid_verdict_is_an_error(answer: object) -> None:
    with pytest.raises(JudgeError, match="nothing was merged"):
        ask(Panel(lambda case: answer), question())


@pytest.mark.contract("G14")
def test_a_judge_may_be_async_and_its_exception_is_an_error() -> None:
    async def judge(case: JudgeCase) -> Choice:
        await asyncio.sleep(0)
        return choice("b", 0.9)

    assert ask(Panel(judge), question()).verdict.winner_branch_id == "b"
    with pytest.raises(JudgeError, match="the model is away"):
        ask(Panel(failing), question())


@pytest.mark.contract("G4")
def test_the_majority_of_three_decides() -> None:
    panel = Panel(
        judges=[
            saying(choice("a", 0.6, "neat"), Usage(usd=1.0, tokens=10, requests=1)),
            saying(choice("b", 0.99), Usage(usd=2.0, tokens=20, requests=1)),
            saying(choice("a", 0.7, "tested"), Usage(usd=4.0, tokens=40, requests=1)),
        ]
    )
    judged = ask(panel, question(kind="vote"))
    assert judged.verdict == choice("a", 0.7, "tested")
    assert judged.usage == Usage(usd=7.0, tokens=70, requests=3), "summed over the vote"


@pytest.mark.contract("G4")
def test_without_a_majority_the_highest_confidence_decides() -> None:
    assert majority([choice("a", 0.4), choice("b", 0.9), choice("c", 0.5)]) == choice("b", 0.9)
    assert majority([choice("a", 0.4)]) == choice("a", 0.4)
    with pytest.raises(ValueError, match="no verdicts"):
        majority([])


@pytest.mark.contract("G4")
def test_the_three_judges_run_concurrently() -> None:
    """Each judge waits until all were called: called one after another they would never return."""
    asked = 0
    all_asked = asyncio.Event()

    async def judge(case: JudgeCase) -> Choice:
        nonlocal asked
        asked += 1
        if asked == 3:
            all_asked.set()
        await asyncio.wait_for(all_asked.wait(), 60)
        return choice("a")

    async def call() -> Judgement:
        return await Panel(judge)(question(kind="vote"))

    assert asyncio.run(call()).verdict.winner_branch_id == "a"
    assert asked == 3


@pytest.mark.contract("G4")
def test_a_judge_that_fails_is_skipped_and_named() -> None:
    judged = ask(Panel(judges=[failing, saying(choice("b")), saying(choice("b"))]),
                 question(kind="vote"))  # fmt: skip
    assert judged.verdict.winner_branch_id == "b"
    assert "the model is away" in str(judged.verdict)
    with pytest.raises(JudgeError, match="no judge of the vote gave a verdict"):
        ask(Panel(failing), question(kind="vote"))


def test_an_empty_panel_is_an_error() -> None:
    """vote_mode_empty_judge_models_list_raises"""
    panel = Panel(model_judge=lambda name: saying(choice("a")))
    with pytest.raises(ValueError, match="judge_models is empty"):
        ask(panel, question(kind="vote", judge_models=[]))
    with pytest.raises(ValueError, match="at least one judge"):
        asyncio.run(vote([], JudgeCase(goal="", report=question().report, outcomes=(), prompt="")))


def test_without_any_judge_it_says_what_to_do() -> None:
    with pytest.raises(JudgeError, match="nothing was merged") as caught:
        ask(Panel(), question())
    assert "judge=" in str(caught.value.hint)


@pytest.mark.contract("G5")
def test_the_panel_follows_the_api_keys_in_the_environment() -> None:
    assert vote_models({}, "own:model") == ["own:model"] * 3
    one = vote_models({"ANTHROPIC_API_KEY": "k"}, "own:model")
    assert len(one) == 3
    assert len(set(one)) == 1
    assert one[0].startswith("anthropic:")
    two = vote_models({"OPENAI_API_KEY": "k", "GROQ_API_KEY": "k"}, "own:model")
    assert [name.split(":")[0] for name in two] == ["openai", "groq", "openai"]
    for name in ("GOOGLE_API_KEY", "GEMINI_API_KEY", "GOOGLE_GENERATIVE_AI_API_KEY"):
        assert vote_models({name: "k"}, "own:model")[0].startswith("google")
    families = vote_models({"OPENROUTER_API_KEY": "k"}, "own:model")
    assert len({name.split("/")[0] for name in families}) == 3
    everything = dict.fromkeys(("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "MISTRAL_API_KEY"), "k")
    assert len(set(vote_models(everything | {"GROQ_API_KEY": "k"}, "own:model"))) == 3
    assert vote_models({"OPENAI_API_KEY": ""}, "own:model") == ["own:model"] * 3


def test_the_strategys_models_judge_where_no_judge_is_given() -> None:
    asked: list[str] = []

    def model_judge(name: str) -> SingleJudge:
        asked.append(name)
        return saying(choice("a"))

    panel = Panel(model_judge=model_judge)
    ask(panel, question(kind="auto"))
    ask(panel, question(kind="vote", judge_models=["x:1", "y:2"]))
    assert asked == [MergeStrategy().judge_model, "x:1", "y:2", "x:1"]
    assert cycled([1, 2, 3, 4]) == [1, 2, 3, 4]
