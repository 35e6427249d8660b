"""The commands that settle how a fork is made. Each returns the new settings and what to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from branching.agent.types import BranchSpec
from branching.tui.chat.command_parser import NotUnderstood
from branching.tui.chat.settings import KINDS, Settings
from branching.tui.formatting import money

Settled = tuple[Settings, str]


def settle(command: str, rest: str, settings: Settings, max_branches: int) -> Settled:
    """Carries out one of the commands. NotUnderstood for wrong arguments."""
    words = rest.split()
    try:
        settled, said = _COMMANDS[command](words, settings)
        return settled.checked(max_branches), said
    except ValueError as error:
        raise NotUnderstood(str(error)) from error


def _branches(words: list[str], settings: Settings) -> Settled:
    if not words:
        return settings, f"a fork has up to {settings.branches} branches"
    if len(words) > 1 or not words[0].isdecimal():
        raise NotUnderstood("write /fork-branches N")
    settings = replace(settings, branches=int(words[0]))
    return settings, f"a fork has up to {settings.branches} branches"


def _budget(words: list[str], settings: Settings) -> Settled:
    if words == ["clear"]:
        return replace(settings, per_branch_usd=None, aggregate_usd=None), "no budgets"
    if words:
        if len(words) != 2 or words[0] not in ("per-branch", "aggregate"):
            raise NotUnderstood("write /fork-budget per-branch USD, aggregate USD, or clear")
        usd = parse_usd(words[1])
        changed: dict[str, Any] = {f"{words[0].replace('-', '_')}_usd": usd}
        settings = replace(settings, **changed)
    each, total = money(settings.per_branch_usd), money(settings.aggregate_usd)
    return settings, f"budget of a branch: {each or 'none'}; of all together: {total or 'none'}"


def _model(words: list[str], settings: Settings) -> Settled:
    if words == ["clear"]:
        return replace(settings, models={}), "every branch has the model of the chat"
    if words:
        if len(words) != 2 or not words[0].isdecimal() or int(words[0]) < 1:
            raise NotUnderstood("write /fork-model I PROVIDER:MODEL, I clear, or clear; I from 1")
        number, model = int(words[0]), words[1]
        if number > settings.branches and model != "clear":
            raise NotUnderstood(
                f"a fork has up to {settings.branches} branches; see /fork-branches"
            )
        models = {i: name for i, name in settings.models.items() if i != number}
        if model != "clear":
            models[number] = checked_model(model)
        settings = replace(settings, models=models)
    told = ", ".join(f"{number}: {name}" for number, name in sorted(settings.models.items()))
    return settings, f"models of branches: {told or 'that of the chat'}"


def _strategy(words: list[str], settings: Settings) -> Settled:
    if words:
        kinds = [kind for kind in KINDS if [kind] == words]
        if not kinds:
            raise NotUnderstood(f"write /fork-strategy and one of {', '.join(KINDS)}")
        settings = replace(settings, strategy=kinds[0])
    return settings, f"the winner is chosen: {settings.strategy}"


_COMMANDS = {
    "/fork-branches": _branches,
    "/fork-budget": _budget,
    "/fork-model": _model,
    "/fork-strategy": _strategy,
}
SETTLING = tuple(_COMMANDS)


def parse_usd(text: str) -> float:
    """Reads an amount: `0.5`, `$0.5`."""
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        raise NotUnderstood(f"{text!r} is not an amount of dollars") from None


def checked_model(name: str) -> str:
    """Returns the name of a model if it says whose it is."""
    provider, _, model = name.partition(":")
    if not provider or not model:
        raise NotUnderstood(f"{name!r} names no provider; write provider:model")
    return name


def spec_of(row: tuple[str, str, str, str]) -> BranchSpec | None:
    """Returns the branch that a row of the picker means (label, steer, model, budget), None for an
    empty row. NotUnderstood for half a row.
    """
    label, steer, model, budget = (field.strip() for field in row)
    if not label and not steer:
        return None
    if not label or not steer:
        raise NotUnderstood(f"branch {label or steer!r} needs a label and an instruction")
    return BranchSpec(
        label,
        steer,
        model=checked_model(model) if model else None,
        budget_usd=parse_usd(budget) if budget else None,
    )
