"""The structured output that a model is asked for as the judge of a fork."""

from __future__ import annotations

from pydantic import BaseModel, Field


class JudgeVerdict(BaseModel):
    """What a judge decided."""

    winner_branch_id: str
    confidence: float = Field(ge=0.0, le=1.0)
    reasoning: str = ""
    rejected_with_reasons: dict[str, str] = Field(default_factory=dict)
    """By branch id."""
    caveats: list[str] = Field(default_factory=list)
