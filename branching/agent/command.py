"""Programs as branches of a fork, and programs as judges.

A program's conversation is its task and the end of its output. Exit code 0 is a success; any other
end is a failure of the branch. In addition to the environment of all commands in a branch
(`run_program`), it gets

    BRANCHING_BRANCH            its branch
    BRANCHING_ATTEMPT           its number in the fork, from 0
    BRANCHING_LABEL             its label
    BRANCHING_STEER             a file with one line for each message from a person; only if
                                messages are possible
    BRANCHING_BUDGET_USD        its budget, if it has one; also BRANCHING_BUDGET_TOKENS and
                                BRANCHING_BUDGET_REQUESTS

Only the program knows its usage. It reports it on descriptor 3, by a line for one or more requests:

    {"usd": 0.02, "tokens": 1200, "requests": 1}

All fields are optional; a line counts as at least one request. The program is stopped at the line
that exceeds its budget or that of the fork. If a program with a budget reports nothing, its branch
fails even with exit code 0, because the budget could not be enforced.

A judge gets the case in BRANCHING_CASE and the labels in BRANCHING_LABELS, one per line. It can
read the files of each branch in the directories of BRANCHING_BRANCHES, in the same order. The last
line of its output is the winner's label, optionally followed by a space and its confidence.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.errors import BudgetExhausted, ForkStateError
from branching.agent.judge import Choice, JudgeCase, JudgeError
from branching.agent.protocols import History, RunOutcome
from branching.agent.run_program import RunSettings, run_program
from branching.agent.types import Usage
from branching.errors import ProcessBranchError
from branching.patterns.command_candidate import LineSplitter
from branching.process import OWN_TMP, Command, Ended
from branching.process.bounded_output import OutputTail
from branching.runlog.run_controller import STOP_GRACE_SECONDS, RunController, append_message

OUTPUT_BYTES_MAX = 64 << 10
"""Of what a program prints, its end is its message."""
CASE_BYTES_MAX = 100_000
"""The kernel refuses a variable of 128 KiB."""
TOLD = ("usd", "tokens", "requests")
"""What only the program itself knows."""
OnOutput = Callable[[str, bytes], None]
"""Called in another thread with a branch's label and output; with empty bytes at the end."""


class CommandRunner:
    """Runs a command in a branch; a string is for the shell."""

    can_pause = True

    def __init__(
        self,
        branch: BranchRuntime,
        command: str | Sequence[str],
        *,
        index: int = 0,
        seen_at: Path | None = None,
        on_output: OnOutput | None = None,
        controller: RunController | None = None,
    ) -> None:
        """`controller` has the steer file; without it no message reaches the program."""
        self._branch = branch
        self._command = command
        self._index = index
        self._seen_at = seen_at or branch.seen_at
        self._on_output = on_output
        self._controller = controller
        self._words: Path | None = None
        self._process: Command | None = None
        self._ended: asyncio.Event | None = None
        self._has_told = False
        self.ended: Ended | None = None
        """How the program of the last run ended, and what it used."""
        self.refusal: BudgetExhausted | None = None
        """Why it was stopped, if it exceeded its budget."""

    async def run(self, prompt: str, history: History) -> RunOutcome:
        branch = self._branch
        if branch.path is None:
            raise ForkStateError("a program needs a branch with files")
        told = [*(history or []), {"role": "user", "content": prompt}]
        branch.capture(told)
        printed = OutputTail(OUTPUT_BYTES_MAX)

        def take(arrived: bytes) -> None:
            printed.feed(arrived)
            self._tell(arrived)

        reports = LineSplitter(lambda line: self._on_line(line, take))
        self._ended, self._has_told, self.refusal = asyncio.Event(), False, None
        branch.pause.on_change = self._pause
        try:
            with self._place() as place:
                ended = await run_program(
                    self._command,
                    place,
                    stdout=take,
                    stderr=take,
                    reports=reports.feed,
                    on_command=self._begin,
                )
            reports.finish()
            self.ended = ended
        finally:
            self._process = None
            self._ended.set()
            self._tell(b"")
            told.append({"role": "assistant", "content": printed.text})
            branch.capture(told)
        if self.refusal is not None:
            raise self.refusal
        if not ended.success:
            raise ProcessBranchError(ended.reason)
        if not self._has_told and (limits := self._told_limits()):
            raise ProcessBranchError(
                "it reported no usage on file descriptor 3, which is required for its budget "
                f"({', '.join(limits)})"
            )
        return RunOutcome(history=told, output=ended, final_message=printed.text)

    def steer(self, text: str) -> None:
        """Adds a line to the program's steer file. The program may not read it."""
        label = self._branch.spec.label
        if self._words is None:
            raise ForkStateError(
                f"branch {label!r} cannot receive messages now: it has no message file"
            )
        append_message(self._words, label, text)

    async def stop(self) -> None:
        """Ends the program with all that it started: SIGTERM, and a moment later SIGKILL."""
        process, ended = self._process, self._ended
        if process is not None and ended is not None:
            process.kill(STOP_GRACE_SECONDS)
            await ended.wait()

    @contextmanager
    def _place(self) -> Iterator[RunSettings]:
        branch = self._branch
        assert branch.path is not None, "it was looked at"
        environment = {
            **branch.environment,
            "BRANCHING_ATTEMPT": str(self._index),
            "BRANCHING_LABEL": branch.spec.label,
            **{
                f"BRANCHING_BUDGET_{name.upper()}": f"{cap:g}" if name == "usd" else str(cap)
                for name, cap in self._own_limits().items()
            },
        }
        if self._controller is None or branch.branch is None:
            yield RunSettings(directory=branch.path, seen_at=self._seen_at, environment=environment)
            return
        with self._controller.steer_file(branch.branch.name) as words:
            beside: tuple[tuple[Path, Path], ...] = ()
            if words is not None:
                seen = OWN_TMP / "branching-steer" / words.name
                beside = ((words.parent, seen.parent),)
                environment["BRANCHING_STEER"] = str(seen)
            self._words = words
            try:
                yield RunSettings(
                    directory=branch.path,
                    seen_at=self._seen_at,
                    environment=environment,
                    beside=beside,
                )
            finally:
                self._words = None

    def _begin(self, process: Command) -> None:
        self._process = process
        if self._branch.pause.is_on:
            process.pause()

    def _pause(self, is_on: bool) -> None:
        if (process := self._process) is not None:
            process.pause(is_on=is_on)

    def _tell(self, arrived: bytes) -> None:
        if self._on_output is not None:
            self._on_output(self._branch.spec.label, arrived)

    def _on_line(self, line: str, show: Callable[[bytes], None]) -> None:
        """Takes a line of descriptor 3; in the thread that attends the program."""
        try:
            used = usage_in(line)
        except ValueError as error:
            show(f"branching: file descriptor 3 is for usage reports; {error}\n".encode())
            return
        self._has_told = True
        try:
            self._branch.charge(used)
        except BudgetExhausted as refusal:
            if self.refusal is None:
                self.refusal = refusal
                if self._process is not None:
                    self._process.kill(STOP_GRACE_SECONDS)

    def _own_limits(self) -> dict[str, float]:
        return _told_caps(vars(self._branch.budget))

    def _told_limits(self) -> list[str]:
        """Returns the limits of the branch and the fork whose usage only the program can report."""
        return sorted({*self._own_limits(), *_told_caps(vars(self._branch.ledger.total))})


def _told_caps(budget: dict[str, Any]) -> dict[str, float]:
    return {name: budget[name] for name in TOLD if budget[name] is not None}


def usage_in(line: str) -> Usage:
    """Parses a line from descriptor 3. Raises ValueError if it is invalid."""
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not told.keys() <= {*TOLD}:
        raise ValueError(f'a line is like {{"usd": 0.02, "tokens": 1200}}, not {line[:80]!r}')
    for name, value in told.items():
        is_number = isinstance(value, int if name != "usd" else (int, float))
        if isinstance(value, bool) or not is_number or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a number of 0 or more, not {value!r}")
    usd = told.get("usd")
    return Usage(
        usd=None if usd is None else float(usd),
        tokens=told.get("tokens", 0),
        requests=max(1, told.get("requests", 1)),
    )


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
        printed = OutputTail(OUTPUT_BYTES_MAX)
        with tempfile.TemporaryDirectory(prefix="branching-judge-") as nowhere:
            place = RunSettings(
                directory=Path(nowhere),
                beside=tuple(shown),
                environment={
                    "BRANCHING_CASE": data.replace("\0", ""),
                    "BRANCHING_LABELS": "\n".join(ids),
                    "BRANCHING_BRANCHES": "\n".join(str(at) for _, at in shown),
                },
            )
            ended = await run_program(
                self._command, place, stdout=printed.feed, stderr=None, timeout=self._timeout
            )
        if not ended.success:
            raise JudgeError(f"the judge failed ({ended.reason}); nothing was merged")
        last = (printed.text.strip().splitlines() or [""])[-1].strip()
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
