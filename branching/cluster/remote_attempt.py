"""One attempt in a base of this machine, which answers with its result and its layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from branching.fs import Branch, Workspace
from branching.patterns.attempt import Attempt
from branching.patterns.base import unique_names
from branching.patterns.results import CandidateResult, checked_score, read_scored
from branching.patterns.runner import Runner

if TYPE_CHECKING:
    from branching.patterns.process_isolation import IsolationOptions
    from branching.patterns.scoring import Evaluate
    from branching.process import ResourceLimits
    from branching.runlog.events import OnEvent


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an attempt does."""

    candidate: Callable[..., object]
    arguments: tuple[object, ...] = ()
    """After the path."""
    read: Callable[[object], CandidateResult] = read_scored
    """Interprets the return value."""
    index: int = 0
    """Number of the attempt, from 0."""
    feedback: str = ""
    evaluate: Evaluate | None = None
    """Returns the score of a success."""
    is_critiqued: bool = False
    """The layer of a failure is needed, too."""
    timeout: float | None = None
    """Time limit in seconds."""
    limits: ResourceLimits | None = None
    apart: IsolationOptions | None = None
    """Isolation of a function; None runs it in this process."""


def run_attempt(
    space: Workspace,
    work: Work,
    *,
    layers: Sequence[IO[bytes]] = (),
    out: IO[bytes],
    on_event: OnEvent | None = None,
) -> Attempt:
    """Runs one attempt in a branch, which is dropped afterwards.

    Args:
        space: A workspace of the base.
        work: What to do.
        layers: Archives that the attempt starts from, each made against the base and the ones
            before it.
        out: The attempt's own layer is written here if it succeeds, or is critiqued.
        on_event: Called for each step.

    Returns:
        The attempt, which has ended. The score is that of `evaluate`, if there is one.

    Raises:
        ConflictError: A layer was made against other content.
        BranchingError: The attempt could not be run.
    """
    parent: Workspace | Branch = space
    name = unique_names("attempt")
    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            branch = parent.load(name(f"layer-{number}"), layer, leased=True)
            stack.callback(branch.abort)
            parent = branch
        with Runner(
            parent,
            name=name,
            timeout=work.timeout,
            limits=work.limits,
            apart=work.apart,
            on_event=on_event,
            first_index=work.index,
            is_nested=bool(layers),
        ) as runner:
            attempt = runner.start(
                work.candidate, *work.arguments, read=work.read, feedback=work.feedback
            )
            for _ in runner.finished():
                if attempt.succeeded and work.evaluate is not None:
                    value = runner.consult(attempt, work.evaluate, attempt.path)
                    try:
                        score = checked_score(value)
                        attempt.answer = attempt.answer._replace(score=score)
                        runner.rate(attempt, score)
                    except ValueError as error:
                        runner.fail(attempt, error)
                if attempt.succeeded or work.is_critiqued:
                    attempt.branch.export(out)
    return attempt
