"""What a request costs, and what it will cost at least.

A price is a callable `price(model, usage) -> dollars or None`: given the model's name, with its
provider in front (`openai:gpt-5-mini`), and the usage of one request. None is an unknown price,
with which a budget in money refuses to run. The default asks genai-prices, which pydantic-ai
brings; a table of one's own is a function of three lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from genai_prices import calc_price
from pydantic_ai.messages import ModelMessage, ModelMessagesTypeAdapter, ModelResponse
from pydantic_ai.models import Model
from pydantic_ai.usage import RequestUsage

from branching.agent.types import Usage

Price = Callable[[str, RequestUsage], "float | None"]

BYTES_PER_TOKEN = 4
"""Roughly, of a conversation as JSON: to reserve a branch's first request."""
_PROBE = RequestUsage(input_tokens=1000, output_tokens=1000)


def listed_price(model: str, usage: RequestUsage) -> float | None:
    """Returns the price by the list of genai-prices; None for a model that is not in it."""
    provider, _, name = model.rpartition(":")
    try:
        return float(calc_price(usage, name, provider_id=provider or None).total_price)
    except (LookupError, ValueError):
        return None


def model_id(model: Model) -> str:
    """Returns the name that a price is asked for."""
    return f"{model.system}:{model.model_name}"


def is_priced(price: Price, model: Model) -> bool:
    """Tells whether a request to the model will have a price."""
    return price(model_id(model), _PROBE) is not None


def expected(price: Price, model: Model, messages: Sequence[ModelMessage]) -> Usage:
    """Returns what a request will take at least: its input, by its length."""
    size = len(ModelMessagesTypeAdapter.dump_json(list(messages)))
    tokens = size // BYTES_PER_TOKEN
    usd = price(model_id(model), RequestUsage(input_tokens=tokens))
    return Usage(usd=usd, tokens=tokens, requests=1)


def used(price: Price, model: Model, response: ModelResponse) -> Usage:
    """Returns what a request took, attempts on other models before it included."""
    usage = response.usage
    usd = price(model_id(model), usage)
    if usd is None and usage.cost is not None:
        usd = float(usage.cost)
    total = Usage(usd=usd, tokens=usage.total_tokens, requests=1)
    for attempt in getattr(response, "failed_attempts", None) or ():
        if attempt.usage is not None:
            cost = attempt.usage.cost
            known = None if cost is None else float(cost)
            total = total + Usage(usd=known, tokens=attempt.usage.total_tokens, requests=1)
    return total
