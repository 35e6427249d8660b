"""Commands in branches: one in a branch that is there, or a race of several in new ones.

Each has a sandbox of its own, under the rules of the desk. Its output is told line by line as it
comes, and kept in the logbook, as that of every candidate of the command line is.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from branching._cancellation import Scope
from branching.errors import BranchError
from branching.fs import Branch, Workspace
from branching.mcp.bounded_output import Output
from branching.mcp.worker_threads import apart
from branching.mcp.workspace_session import MAIN, Desk
from branching.patterns import Event, SpeculationOutcome
from branching.patterns.attempt import Attempt, Task
from branching.patterns.command_callbacks import Scorer
from branching.patterns.command_candidate import Program, shell
from branching.process import Budget, Ended, ResourceLimits
from branching.runlog.events import taking_blocks
from branching.runlog.run_log import Logbook

SECONDS_DEFAULT = 600.0

Tell = Callable[[Event], None]
Pattern = Callable[[Workspace | Branch], SpeculationOutcome]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a command."""

    ended: Ended
    output: Output
    log: str
    """The name under which its output is kept."""


@dataclass(frozen=True, kw_only=True)
class Raced:
    """What became of a race."""

    outcome: SpeculationOutcome
    outputs: dict[int, Output]
    """Of each candidate that was started, by its index."""


def seconds_for(desk: Desk, wanted: float | None) -> float:
    """Returns the time limit of a command. ValueError if more is wanted than the rules allow."""
    longest = desk.rules.seconds_max
    if wanted is not None and wanted > longest:
        raise ValueError(
            f"timeout_seconds is {wanted:g}, and this server allows at most {longest:g}"
        )
    return min(wanted or SECONDS_DEFAULT, longest)


async def run(desk: Desk, name: str, command: str, *, seconds: float, tell: Tell) -> Ran:
    """Runs a command by the shell in a branch that is there, which it leaves as it is then."""
    branch = await desk.find(name)
    output, log, scope = Output(), log_name(name), Scope()
    call = logged(desk, branch, program(desk, command), log, seconds, output, tell)
    with desk.running(name, scope):
        ended = await apart(call, name=log, scope=scope)
    return Ran(ended=ended, output=output, log=log)


def log_name(branch: str) -> str:
    """Returns a new name for the output of a command in a branch."""
    return f"{branch}-run-{secrets.token_hex(4)}"


def logged(
    desk: Desk,
    branch: Branch,
    program: Program,
    log: str,
    seconds: float,
    output: Output,
    tell: Tell = lambda _: None,
) -> Callable[[], Ended]:
    """Returns the function that runs a program in a branch; it blocks, and runs under a scope.

    What it prints goes to `output`, and to the logbook under the name `log`.
    """
    name, command = branch.name, program.label

    def listen(event: Event) -> None:
        if event.kind == "output":
            output.add(event.text)
        tell(event)

    def call() -> Ended:
        with Logbook.of(desk.workspace, "mcp run") as logbook, logbook.steered():
            logbook.helm.call(log, name)
            on_event = logbook.and_then(listen)

            def event(kind: Any, **facts: Any) -> None:
                on_event(Event(kind=kind, index=0, branch=log, label=command, **facts))

            event("started")
            ended = _ended(
                desk, branch, program, seconds, lambda block: event("output", text=block)
            )
            state = "succeeded" if ended.success else "failed"
            event("finished", state=state, text=ended.reason, seconds=ended.wall_seconds)
            return ended

    return call


def _ended(
    desk: Desk, branch: Branch, program: Program, seconds: float, say: Callable[[str], None]
) -> Ended:
    limits = replace(desk.rules.limits or ResourceLimits(), wall_time=seconds)
    budget = Budget(limits, None)
    budget.open()
    try:
        attempt = Attempt(0, branch, "", program.label)
        attempt.budget = budget
        task = Task(attempt, lambda _, block: say(block), must_end=True)
        outer = Scope.current()
        assert outer is not None, "it is run apart, under a scope"
        outer.on_cancel(task.cancel)
        try:
            ended = task.run(program, branch.path).value
        finally:
            outer.forget(task.cancel)
    finally:
        budget.close()
    assert isinstance(ended, Ended), "a program answers with its end"
    return ended


async def race(
    desk: Desk,
    what: str,
    make: Callable[[dict[str, Any]], Pattern],
    *,
    parent: str,
    seconds: float,
    setup: str | None,
    only: Sequence[str],
    drop_rest: bool,
    commit: bool,
    candidates: int,
    tell: Tell,
) -> Raced:
    """Runs the pattern that `make` returns for the options that all patterns have.

    BranchError if it is to commit, and the user alone commits.

    The answer has room for a part of the output of each of the `candidates`. The session ends the
    branch of a winner that is not committed, or not all of it.
    """
    if commit and desk.rules.propose:
        raise BranchError(
            "the race was not started: this server proposes changes, and the user commits them",
            hint="leave commit out: the winner's branch stays open",
        )
    room = min(CANDIDATE_CHARACTERS_MAX, RACE_CHARACTERS_MAX // candidates)
    origin = desk.workspace if parent == MAIN else await desk.find(parent)
    outputs: dict[int, Output] = {}
    tried: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "started":
            tried.append(event.branch)
            desk.race_began(event.branch)
            outputs[event.index] = Output(room // 4, room - room // 4)
        elif event.kind == "output":
            outputs[event.index].add(event.text)
        tell(event)

    def call() -> SpeculationOutcome:
        book = Logbook.of(desk.workspace, f"mcp {what}", keeps_store=True)
        with book as logbook, logbook.steered():
            pattern = make(
                {
                    "timeout": seconds,
                    "commit": commit,
                    "only": only,
                    "drop_rest": drop_rest,
                    "setup": program(desk, setup) if setup else None,
                    "on_event": logbook.and_then(taking_blocks(listen)),
                    "resource_limits": desk.rules.limits,
                }
            )
            try:
                return pattern(origin)
            finally:
                desk.race_ended(tried)

    scope = Scope()
    with desk.running(parent, scope):
        outcome = await apart(call, name=what, scope=scope)
    if outcome.branch is not None and outcome.branch.is_open:
        await desk.adopt(outcome.branch.name)
    return Raced(outcome=outcome, outputs=outputs)


CANDIDATE_CHARACTERS_MAX = 4_000
"""Characters of one candidate's output that the answer has; the log has all of it."""
RACE_CHARACTERS_MAX = 20_000
"""The same for all candidates of a race together."""


def program(
    desk: Desk, command: str, *, score: bool = False, port_base: int | None = None
) -> Program:
    """Returns a command as a candidate."""
    options = {"score": score, "port_base": port_base, **_surroundings(desk)}
    return Program(shell(command), label=command, **options)


def scorer(desk: Desk, command: str) -> Scorer:
    """Returns a command that says what a branch is worth."""
    return Scorer(shell(command), label=command, score=True, **_surroundings(desk))


def _surroundings(desk: Desk) -> dict[str, Any]:
    rules = desk.rules
    return {
        "workspace": desk.workspace.seen_at,
        "owner": desk.owner,
        "hide": rules.hide,
        "network": rules.network,
        "clean_env": rules.clean_env,
        "env": {name: os.environ[name] for name in rules.env if name in os.environ},
    }
