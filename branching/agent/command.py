"""Any program as a branch of a fork, and any program as the judge.

A program's conversation is what it was told and the end of what it printed. It succeeds with exit
code 0; any other end is a failed branch. Beyond the environment of all commands in a branch
(`program`) it has

    BRANCHING_BRANCH    its branch
    BRANCHING_ATTEMPT   its number in the fork, from 0
    BRANCHING_LABEL     its label

A judge is told the case in BRANCHING_CASE, the labels in BRANCHING_LABELS, a line each, and sees
each branch's files, read-only, in the directories that BRANCHING_BRANCHES lists in the same order.
The last line that it prints is the winner's label, and after a blank, if it wants, its confidence.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from branching.agent.errors import ForkStateError
from branching.agent.judge import Choice, JudgeCase, JudgeError
from branching.agent.program import Place, run_program
from branching.agent.protocols import History, RunOutcome
from branching.agent.runtime import BranchRuntime
from branching.errors import ProcessBranchError
from branching.process import OWN_TMP

OUTPUT_BYTES_MAX = 64 << 10
"""Of what a program prints, its end is its message."""
CASE_BYTES_MAX = 100_000
"""The kernel refuses a variable of 128 KiB."""
OnOutput = Callable[[str, bytes], None]
"""Is told what a branch prints, by its label."""


class CommandRunner:
    """Runs a command in a branch; a string is for the shell."""

    def __init__(
        self,
        branch: BranchRuntime,
        command: str | Sequence[str],
        *,
        index: int = 0,
        seen_at: Path | None = None,
        on_output: OnOutput | None = None,
    ) -> None:
        self._branch = branch
        self._command = command
        self._index = index
        self._seen_at = seen_at
        self._on_output = on_output

    async def run(self, prompt: str, history: History) -> RunOutcome:
        branch = self._branch
        if branch.path is None:
            raise ForkStateError("a program needs a branch with files")
        told = [*(history or []), {"role": "user", "content": prompt}]
        branch.capture(told)
        printed = _Tail(self._tell)
        place = Place(
            directory=branch.path,
            seen_at=self._seen_at,
            environment={
                **branch.environment,
                "BRANCHING_ATTEMPT": str(self._index),
                "BRANCHING_LABEL": branch.spec.label,
            },
        )
        try:
            done = await run_program(self._command, place, stdout=printed.feed, stderr=printed.feed)
        finally:
            told.append({"role": "assistant", "content": printed.text()})
            branch.capture(told)
        if not done.ended.success:
            raise ProcessBranchError(done.ended.reason)
        return RunOutcome(history=told, output=done.ended, final_message=printed.text())

    def steer(self, text: str) -> None:  # noqa: ARG002
        """A program cannot be told anything on its way."""
        raise ForkStateError(f"branch {self._branch.spec.label!r} is a program: it hears nothing")

    async def stop(self) -> None:
        """Nothing is left: the program's sandbox ends with its run."""

    def _tell(self, arrived: bytes) -> None:
        if self._on_output is not None:
            self._on_output(self._branch.spec.label, arrived)


class CommandJudge:
    """A command as the judge of a fork."""

    def __init__(
        self,
        command: str | Sequence[str],
        branches: Callable[[], Sequence[BranchRuntime]],
        *,
        timeout: float | None = None,
    ) -> None:
        self._command = command
        self._branches = branches
        self._timeout = timeout

    async def __call__(self, case: JudgeCase) -> Choice:
        """Raises JudgeError when the command fails, or names no branch."""
        ids = {each.label: each.branch_id for each in case.outcomes}
        shown = [
            (branch.path, OWN_TMP / "branching-branches" / str(index))
            for index, branch in enumerate(self._branches())
            if branch.path is not None
        ]
        data = case.prompt.encode()[:CASE_BYTES_MAX].decode("utf-8", "ignore")
        printed = _Tail()
        with tempfile.TemporaryDirectory(prefix="branching-judge-") as nowhere:
            place = Place(
                directory=Path(nowhere),
                beside=tuple(shown),
                environment={
                    "BRANCHING_CASE": data.replace("\0", ""),
                    "BRANCHING_LABELS": "\n".join(ids),
                    "BRANCHING_BRANCHES": "\n".join(str(at) for _, at in shown),
                },
            )
            done = await run_program(
                self._command, place, stdout=printed.feed, stderr=None, timeout=self._timeout
            )
        if not done.ended.success:
            raise JudgeError(f"the judge failed ({done.ended.reason}); nothing was merged")
        last = (printed.text().strip().splitlines() or [""])[-1].strip()
        label, _, confidence = last.rpartition(" ")
        if last in ids:
            return Choice(winner_branch_id=ids[last])
        try:
            return Choice(winner_branch_id=ids[label], confidence=float(confidence))
        except (KeyError, ValueError):
            raise JudgeError(
                f"the judge's last line must be a label ({', '.join(ids)}), not {last!r}; "
                "nothing was merged"
            ) from None


def best_tested(case: JudgeCase) -> str:
    """Judges without a model: the branch whose tests pass the most, and of equals the first."""
    winner = max(
        (each for each in case.outcomes if not each.error_count),
        key=lambda each: each.test_pass_ratio or 0.0,
        default=None,
    )
    if winner is None:
        raise JudgeError("every branch has failed; nothing was merged")
    return winner.branch_id


class _Tail:
    """The end of what was printed."""

    def __init__(self, tell: Callable[[bytes], None] | None = None) -> None:
        self._data = b""
        self._tell = tell

    def feed(self, arrived: bytes) -> None:
        self._data = (self._data + arrived)[-OUTPUT_BYTES_MAX:]
        if self._tell is not None:
            self._tell(arrived)

    def text(self) -> str:
        return self._data.decode("utf-8", "replace")
