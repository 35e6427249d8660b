"""Candidates that run in children of a session and start from its memory.

The session is forked once. Each candidate runs in a child, in a thread that waits for it. A winner
is picked: it becomes the session, and its files are the session's. The others are killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from branching._cancellation import CancelScope
from branching.errors import MemoryBranchError
from branching.fs import DiffSummary
from branching.patterns.attempt import label_of
from branching.patterns.outcome import SpeculationOutcome, SpeculationResult
from branching.patterns.results import CandidateResult

if TYPE_CHECKING:
    from branching.session import Child, Session

Candidate = str | Callable[..., object]
"""Python code, whose last line is its value, or a function."""
Calls = Sequence[tuple[Candidate, tuple[int, ...]]]


class SessionCandidates:
    """The candidates of one call, and their results."""

    def __init__(
        self,
        session: Session,
        calls: Calls,
        *,
        read: Callable[[object], CandidateResult],
        timeout: float | None,
        max_parallel: int | None,
    ) -> None:
        self._session = session
        self._calls = calls
        self._read = read
        self._timeout = timeout
        self._max_parallel = max_parallel

    def run(
        self,
        *,
        first_wins: bool,
        rate: Callable[[int, float | None, Path], float],
    ) -> SpeculationOutcome:
        """Runs all candidates and picks one: the first success, or the best.

        Of equal scores the first in candidate order wins. Without a success, and after an
        exception, the session continues as before.
        """
        children = self._session.fork(len(self._calls))
        results = [self._result(child, state="cancelled") for child in children]
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        pool = ThreadPoolExecutor(self._max_parallel or len(children))
        winner = None
        scope = CancelScope.current() or CancelScope()

        def stop(_: float) -> None:
            for child in children:
                child._interpreter.kill("the call was cancelled")

        scope.on_cancel(stop)
        try:
            futures: dict[Future[tuple[SpeculationResult, float | None]], int] = {
                pool.submit(self._attempt, child, deadline): child.index for child in children
            }
            try:
                for future in as_completed(futures, timeout=self._timeout):
                    index = futures[future]
                    result, returned = future.result()
                    results[index] = result
                    if not result.success:
                        continue
                    score = rate(index, returned, children[index].branch.path)
                    results[index] = result = replace(result, score=score)
                    if winner is None or (-score, index) < (-winner.score, winner.branch_index):
                        winner = result
                    if first_wins:
                        break
            except FuturesTimeoutError:
                pass  # the best of those that have finished is picked
            for future in futures:
                future.cancel()
            changes = []
            scope.forget(stop)
            if scope.is_cancelled:
                winner = None
            if winner is not None:
                changes = self._session.pick(children[winner.branch_index])
        finally:
            if self._session.is_forked:
                self._session.none()
            pool.shutdown()  # those that still ran have been killed
        if winner is not None:
            index = winner.branch_index
            winner = results[index] = replace(
                results[index], state="won", changes=DiffSummary.of(changes)
            )
        is_late = deadline is not None and time.monotonic() >= deadline
        return SpeculationOutcome(
            committed=winner is not None,
            winner=winner,
            all_results=results,
            changes=changes,
            timed_out=is_late and winner is None,
        )

    def _attempt(
        self, child: Child, deadline: float | None
    ) -> tuple[SpeculationResult, float | None]:
        """Returns the result of a candidate, and the score that it returned."""
        candidate, arguments = self._calls[child.index]
        started = time.monotonic()
        left = None if deadline is None else max(0.001, deadline - started)
        try:
            if isinstance(candidate, str):
                cell = child.run(candidate, timeout=left)
            else:
                path = self._session.branch.seen_at
                cell = child.run(candidate, path, *arguments, timeout=left)
            answer = self._read(cell.result())
        except TimeoutError as error:
            return self._result(child, state="timed_out", exception=error, started=started), None
        except MemoryBranchError as error:
            state = "cancelled" if not child.is_alive else "error"
            return self._result(child, state=state, exception=error, started=started), None
        except Exception as error:
            result = self._result(child, state="error", exception=error, started=started, code=1)
            return result, None
        result = self._result(
            child, state="succeeded" if answer.success else "failed", started=started
        )
        result = replace(
            result,
            success=answer.success,
            return_value=answer.value,
            score=answer.score if answer.score is not None else float(answer.success),
            exit_code=answer.exit_code,
        )
        return result, answer.score

    def _result(
        self,
        child: Child,
        *,
        state: str,
        exception: BaseException | None = None,
        started: float | None = None,
        code: int = 0,
    ) -> SpeculationResult:
        candidate = self._calls[child.index][0]
        return SpeculationResult(
            branch_index=child.index,
            success=False,
            exception=exception,
            branch_path=child.branch.path,
            exit_code=code,
            state=state,  # type: ignore[arg-type]
            duration=0.0 if started is None else time.monotonic() - started,
            branch_name=child.branch.name,
            label=candidate if isinstance(candidate, str) else label_of(candidate),
        )
