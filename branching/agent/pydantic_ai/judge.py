"""A model as the judge of a fork."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models import Model, infer_model

from branching.agent.judge import JudgeCase, Opinion, SingleJudge, evaluate
from branching.agent.judge_verdict import JudgeVerdict
from branching.agent.pydantic_ai.pricing import Price, listed_price, used
from branching.agent.types import BranchDiffReport, BranchOutcome, Usage, Verdict

OnVerdict = Callable[[JudgeVerdict], None]
"""Receives the partial verdict while it is streamed."""


def model_judge(
    model: Model | str,
    *,
    instructions: str | None = None,
    price: Price = listed_price,
    on_verdict: OnVerdict | None = None,
) -> SingleJudge:
    """Returns a judge that asks a model for a `JudgeVerdict`.

    `instructions` precede the case. With `on_verdict` the answer is streamed. The opinion's usage
    has its cost, which no branch is charged for.
    """

    async def judge(case: JudgeCase) -> Opinion:
        asked = infer_model(model)
        agent: Agent[None, JudgeVerdict] = Agent(
            asked, output_type=JudgeVerdict, instructions=instructions
        )
        if on_verdict is None:
            result = await agent.run(case.prompt)
            verdict, messages = result.output, result.all_messages()
        else:
            async with agent.run_stream(case.prompt) as stream:
                async for partial in stream.stream_output(debounce_by=None):
                    on_verdict(partial)
                verdict, messages = await stream.get_output(), stream.all_messages()
        usage = Usage()
        for message in messages:
            if isinstance(message, ModelResponse):
                usage = usage + used(price, asked, message)
        return Opinion(verdict=verdict, usage=usage)

    return judge


class JudgeAgent:
    """A judge to be called without a coordinator."""

    def __init__(self, model: Model | str) -> None:
        self._judge = model_judge(model)

    async def evaluate(
        self, goal: str, diff_report: BranchDiffReport, outcomes: Sequence[BranchOutcome]
    ) -> tuple[Verdict, Usage]:
        """Asks the model which branch is best. Nothing is merged.

        Returns:
            The verdict, a `JudgeVerdict`, and what asking the model has used.

        Raises:
            JudgeError: The model cannot be asked, or it chose none of the branches.
        """
        opinion = await evaluate(self._judge, JudgeCase.of(goal, diff_report, outcomes))
        return opinion.verdict, opinion.usage
