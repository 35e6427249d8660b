"""The tools that race commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from mcp.server.mcpserver import Context
from pydantic import Field

from branching.mcp import execution, progress
from branching.mcp.execution import program, scorer, seconds_for
from branching.mcp.models import RaceResult
from branching.mcp.parameters import (
    COMMAND_CHARACTERS_MAX,
    Command,
    Commit,
    DropRest,
    Globs,
    Parent,
    Seconds,
    Setup,
)
from branching.mcp.roots import AllowedSession
from branching.mcp.workspace_session import MAIN, WorkspaceSession
from branching.patterns import BestOfN, Speculate

CANDIDATES_MAX = 64


async def branch_speculate(
    session: AllowedSession,
    ctx: Context,
    candidates: Annotated[
        list[Command],
        Field(min_length=1, max_length=CANDIDATES_MAX, description="Shell commands to race"),
    ],
    timeout_seconds: Seconds = None,
    setup: Setup = None,
    only: Globs = [],  # noqa: B006
    drop_rest: DropRest = False,
    commit: Commit = False,
    parent: Parent = MAIN,
) -> RaceResult:
    """Run several shell commands in parallel, each in its own branch. The first one that exits
    with 0 wins; the others are killed and their branches deleted. End each command with the check
    that decides, for example "./fix-a && make test". The winner's branch is left open, unless
    commit is true.
    """

    def make(options: dict[str, Any]) -> execution.Pattern:
        return Speculate([program(session, each) for each in candidates], **options)

    options: dict[str, Any] = {"parent": parent, "setup": setup, "commit": commit}
    options |= {"only": only, "drop_rest": drop_rest}
    options["candidates"] = len(candidates)
    return await _raced(session, ctx, "speculate", make, timeout_seconds, options, scored=False)


async def branch_best_of_n(
    session: AllowedSession,
    ctx: Context,
    candidates: Annotated[
        list[Command],
        Field(
            min_length=1,
            max_length=CANDIDATES_MAX,
            description="Shell commands; a single one is run n times, told apart by "
            "$BRANCHING_ATTEMPT (0, 1, ...)",
        ),
    ],
    n: Annotated[
        int | None, Field(ge=1, le=CANDIDATES_MAX, description="How often to run a single command")
    ] = None,
    evaluate: Annotated[
        str | None,
        Field(
            description="A command run in the branch of each success; the number it prints last is "
            "the score. Without it candidates write theirs to descriptor 3: echo 0.9 >&3",
            max_length=COMMAND_CHARACTERS_MAX,
        ),
    ] = None,
    timeout_seconds: Seconds = None,
    setup: Setup = None,
    only: Globs = [],  # noqa: B006
    drop_rest: DropRest = False,
    commit: Commit = False,
    parent: Parent = MAIN,
) -> RaceResult:
    """Run several shell commands in parallel, each in its own branch, wait for all, and choose the
    one with the highest score. The score is the last number that `evaluate` prints in the branch,
    or that the command writes to file descriptor 3; without one it is 1. Commands that exit
    non-zero cannot win. All other branches are deleted. The winner's branch is left open, unless
    commit is true.
    """
    if n is not None and len(candidates) > 1:
        raise ValueError("n is for a single command; several candidates are run once each")

    def make(options: dict[str, Any]) -> execution.Pattern:
        programs = [program(session, each, score=True) for each in candidates]
        judge = scorer(session, evaluate) if evaluate else None
        if len(programs) == 1:
            return BestOfN(programs[0], n or 1, evaluate=judge, **options)
        return BestOfN(programs, evaluate=judge, **options)

    options: dict[str, Any] = {"parent": parent, "setup": setup, "commit": commit}
    options |= {"only": only, "drop_rest": drop_rest}
    options["candidates"] = max(n or 1, len(candidates))
    return await _raced(session, ctx, "best-of-n", make, timeout_seconds, options, scored=True)


async def _raced(
    session: WorkspaceSession,
    ctx: Context,
    what: str,
    make: Callable[[dict[str, Any]], execution.Pattern],
    timeout_seconds: float | None,
    options: dict[str, Any],
    *,
    scored: bool,
) -> RaceResult:
    async with progress.report_progress(ctx) as tell:
        seconds = seconds_for(session, timeout_seconds)
        raced = await execution.race(session, what, make, seconds=seconds, tell=tell, **options)
    return RaceResult.of(raced, scored=scored, propose=session.rules.propose)
