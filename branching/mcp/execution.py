"""Runs commands: one in an existing branch, or a race of several in new branches.

Each command runs in its own sandbox under the session's rules. Its output is reported line by line
and kept in the run log, as for candidates of the command line.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from branching._cancellation import CancelScope
from branching.errors import BranchError
from branching.fs import Branch, Workspace
from branching.mcp.bounded_output import BoundedOutput
from branching.mcp.worker_threads import run_long
from branching.mcp.workspace_session import MAIN, WorkspaceSession
from branching.patterns import Event, SpeculationOutcome
from branching.patterns.attempt import Attempt, Task
from branching.patterns.command_callbacks import Scorer
from branching.patterns.command_candidate import Program, shell
from branching.process import CallLimits, Ended, ResourceLimits
from branching.runlog.events import taking_blocks
from branching.runlog.run_log import RunLog

SECONDS_DEFAULT = 600.0

Tell = Callable[[Event], None]
Pattern = Callable[[Workspace | Branch], SpeculationOutcome]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The result of a command."""

    ended: Ended
    output: BoundedOutput
    log: str
    """The name of its output in the run log."""


@dataclass(frozen=True, kw_only=True)
class Raced:
    """The result of a race."""

    outcome: SpeculationOutcome
    outputs: dict[int, BoundedOutput]
    """The output of each candidate that was started, by its index."""


def seconds_for(session: WorkspaceSession, wanted: float | None) -> float:
    """Returns the time limit in seconds. Raises ValueError above the rules' maximum."""
    longest = session.rules.seconds_max
    if wanted is not None and wanted > longest:
        raise ValueError(
            f"timeout_seconds is {wanted:g}, and this server allows at most {longest:g}"
        )
    return min(wanted or SECONDS_DEFAULT, longest)


async def run(
    session: WorkspaceSession, name: str, command: str, *, seconds: float, tell: Tell
) -> Ran:
    """Runs a shell command in an existing branch. The branch stays open."""
    branch = await session.find(name)
    output, log, scope = BoundedOutput(), log_name(name), CancelScope()
    call = logged(session, branch, program(session, command), log, seconds, output, tell)
    with session.running(name, scope):
        ended = await run_long(call, name=log, scope=scope)
    return Ran(ended=ended, output=output, log=log)


def log_name(branch: str) -> str:
    """Returns a new name for the run log of a command in a branch."""
    return f"{branch}-run-{secrets.token_hex(4)}"


def logged(
    session: WorkspaceSession,
    branch: Branch,
    program: Program,
    log: str,
    seconds: float,
    output: BoundedOutput,
    tell: Tell = lambda _: None,
) -> Callable[[], Ended]:
    """Returns a function that runs a program in a branch.

    The function blocks and must be called under a CancelScope. It writes the program's output to
    `output`, and to the run log under the name `log`.
    """
    name, command = branch.name, program.label

    def listen(event: Event) -> None:
        if event.kind == "output":
            output.add(event.text)
        tell(event)

    def call() -> Ended:
        with RunLog.of(session.workspace, "mcp run") as run, run.controlled():
            run.controller.call(log, name)
            on_event = run.and_then(listen)

            def event(kind: Any, **facts: Any) -> None:
                on_event(Event(kind=kind, index=0, branch=log, label=command, **facts))

            event("started")
            ended = _ended(
                session, branch, program, seconds, lambda block: event("output", text=block)
            )
            state = "succeeded" if ended.success else "failed"
            event("finished", state=state, text=ended.reason, seconds=ended.wall_seconds)
            return ended

    return call


def _ended(
    session: WorkspaceSession,
    branch: Branch,
    program: Program,
    seconds: float,
    say: Callable[[str], None],
) -> Ended:
    limits = replace(session.rules.limits or ResourceLimits(), wall_time=seconds)
    budget = CallLimits(limits, None)
    budget.open()
    try:
        attempt = Attempt(0, branch, "", program.label)
        attempt.budget = budget
        task = Task(attempt, lambda _, block: say(block), must_end=True)
        outer = CancelScope.current()
        assert outer is not None, "it is called under a scope"
        outer.on_cancel(task.cancel)
        try:
            ended = task.run(program, branch.path).value
        finally:
            outer.forget(task.cancel)
    finally:
        budget.close()
    assert isinstance(ended, Ended), "a program returns how it ended"
    return ended


async def race(
    session: WorkspaceSession,
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
    """Runs a pattern.

    A winner's branch that is not committed, or only in part, belongs to the session afterwards.

    Args:
        session: The session.
        what: The name of the pattern, for the run log.
        make: Returns the pattern for the options that all patterns have.
        parent: The name of the branch to fork, or "main".
        seconds: The time limit.
        setup: A shell command that prepares the candidates' parent, or None.
        only: Glob patterns of the paths to commit; empty for all.
        drop_rest: Drop the changes that `only` leaves out.
        commit: Commit the winner.
        candidates: The number of candidates. The answer has a part of the output of each.
        tell: Receives the events.

    Raises:
        BranchError: `commit` is set, and the server only proposes changes.
    """
    if commit and session.rules.propose:
        raise BranchError(
            "the race was not started: this server proposes changes, and the user commits them",
            hint="leave commit out: the winner's branch stays open",
        )
    room = min(CANDIDATE_BYTES_MAX, RACE_BYTES_MAX // candidates)
    origin = session.workspace if parent == MAIN else await session.find(parent)
    outputs: dict[int, BoundedOutput] = {}
    tried: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "started":
            tried.append(event.branch)
            session.race_began(event.branch)
            outputs[event.index] = BoundedOutput(room // 4, room - room // 4)
        elif event.kind == "output":
            outputs[event.index].add(event.text)
        tell(event)

    def call() -> SpeculationOutcome:
        book = RunLog.of(session.workspace, f"mcp {what}", keeps_store=True)
        with book as run, run.controlled():
            pattern = make(
                {
                    "timeout": seconds,
                    "commit": commit,
                    "only": only,
                    "drop_rest": drop_rest,
                    "setup": program(session, setup) if setup else None,
                    "on_event": run.and_then(taking_blocks(listen)),
                    "resource_limits": session.rules.limits,
                }
            )
            try:
                return pattern(origin)
            finally:
                session.race_ended(tried)

    scope = CancelScope()
    with session.running(parent, scope):
        outcome = await run_long(call, name=what, scope=scope)
    if outcome.branch is not None and outcome.branch.is_open:
        await session.adopt(outcome.branch.name)
    return Raced(outcome=outcome, outputs=outputs)


CANDIDATE_BYTES_MAX = 4_000
"""Maximum size of one candidate's output in the answer."""
RACE_BYTES_MAX = 20_000
"""Maximum size of all candidates' output in the answer."""


def program(
    session: WorkspaceSession, command: str, *, score: bool = False, port_base: int | None = None
) -> Program:
    """Returns a shell command as a candidate. Raises ValueError if it has a NUL character."""
    if "\0" in command:
        raise ValueError("a command cannot contain a NUL character")
    options = {"score": score, "port_base": port_base, **_isolation_options(session)}
    return Program(shell(command), label=command, **options)


def scorer(session: WorkspaceSession, command: str) -> Scorer:
    """Returns a shell command that scores a branch."""
    return Scorer(shell(command), label=command, score=True, **_isolation_options(session))


def _isolation_options(session: WorkspaceSession) -> dict[str, Any]:
    rules = session.rules
    return {
        "workspace": session.workspace.seen_at,
        "owner": session.owner,
        "hide": rules.hide,
        "network": rules.network,
        "clean_env": rules.clean_env,
        "env": {name: os.environ[name] for name in rules.env if name in os.environ},
    }
