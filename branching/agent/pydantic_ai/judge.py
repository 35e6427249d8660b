"""A model as the judge of a fork."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models import Model, infer_model

from branching.agent.judge import JudgeCase, Opinion, SingleJudge
from branching.agent.pydantic_ai.prices import Price, listed_price, used
from branching.agent.types import Usage


class JudgeVerdict(BaseModel):
    """What a judge decided."""

    winner_branch_id: str
    confidence: float = Field(ge=0.0, le=1.0)
    reasoning: str = ""
    rejected_with_reasons: dict[str, str] = Field(default_factory=dict)
    """By branch id."""
    caveats: list[str] = Field(default_factory=list)


OnVerdict = Callable[[JudgeVerdict], None]
"""Is told the verdict as it is written: each time as far as it has come."""


def model_judge(
    model: Model | str,
    *,
    instructions: str | None = None,
    price: Price = listed_price,
    on_verdict: OnVerdict | None = None,
) -> SingleJudge:
    """Returns a judge that asks a model for a `JudgeVerdict`.

    `instructions` stand before the case, for a field with rules of its own. With `on_verdict` the
    answer is streamed. What it costs stands in the opinion's usage, in no branch's.
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
