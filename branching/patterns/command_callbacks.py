"""Commands as callbacks of the patterns: their environment, and how their output is interpreted.

    Scorer      evaluate: a number, written to descriptor 3 or printed last
    Judge       judge: prints `a` or `b`, the better of the two branches
    Expander    expand: prints the candidates to try next, one shell command a line

Each runs in the branch in question, with the environment of every command in a branch
(`command_candidate.py`). A failure raises ProcessBranchError and ends the call: a missing judgement
must not count as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from branching.errors import ProcessBranchError
from branching.patterns.command_candidate import BranchCommand, number_in
from branching.process import OWN_TMP, Ended

ANSWER_BYTES_MAX = 1 << 20
"""Maximum output of a callback. More is an error."""


class _Callback(BranchCommand):
    """A command whose output is data. `what` is its name in error messages."""

    what = "callback"

    def _ask(
        self,
        path: Path,
        environment: Mapping[str, str],
        beside: Sequence[tuple[Path, Path]] = (),
    ) -> tuple[Ended, str]:
        printed: list[bytes] = []
        size = 0

        def take(arrived: bytes) -> None:
            nonlocal size
            size += len(arrived)
            if size <= ANSWER_BYTES_MAX:
                printed.append(arrived)

        ended = self._run(path, take, self._stderr, environment, beside)
        if not ended.success:
            raise self._failure(ended.reason)
        if size > ANSWER_BYTES_MAX:
            raise self._failure(f"it printed more than {ANSWER_BYTES_MAX} bytes")
        return ended, b"".join(printed).decode("utf-8", "replace").strip()

    def _failure(self, reason: str) -> ProcessBranchError:
        return ProcessBranchError(
            f"the {self.what} command failed ({reason}); nothing was committed: {self.label}"
        )


class Scorer(_Callback):
    """`evaluate(path)` as a command."""

    what = "evaluate"

    def __call__(self, path: Path) -> float:
        ended, printed = self._ask(path, {})
        score = number_in(ended.score.strip() or printed)
        if score is None:
            raise self._failure("it wrote no number to descriptor 3 or as its last line")
        return score


class Judge(_Callback):
    """`judge(path_a, path_b)` as a command: `BRANCHING_A` and `BRANCHING_B` are the directories."""

    what = "judge"

    def __call__(self, path_a: Path, path_b: Path) -> int:
        if self._isolation == "none":
            seen_a, seen_b = path_a, path_b
        else:  # it runs in branch a, with branch b mounted as a second directory
            seen_a, seen_b = self._workspace, OWN_TMP / "branching-b"
        names = {"BRANCHING_A": str(seen_a), "BRANCHING_B": str(seen_b)}
        _, printed = self._ask(path_a, names, [(path_b, seen_b)])
        answer = printed.splitlines()[-1].strip().lower() if printed else ""
        if answer not in _CHOICES:
            raise self._failure(f"its last line must be `a` or `b`, not {answer!r}")
        return _CHOICES[answer]


_CHOICES = {"a": 0, "0": 0, "b": 1, "1": 1}


class Expander(_Callback):
    """`expand(path, depth)` as a command: `BRANCHING_DEPTH` is the level, from 1."""

    what = "expand"

    def __init__(
        self, argv: list[str], *, make: Callable[[str], Callable[..., object]], **options: Any
    ) -> None:
        super().__init__(argv, **options)
        self._make = make

    def __call__(self, path: Path, depth: int) -> list[Callable[..., object]]:
        _, printed = self._ask(path, {"BRANCHING_DEPTH": str(depth)})
        return [self._make(line) for line in printed.splitlines() if line.strip()]
