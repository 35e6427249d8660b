"""What a command prints at its end: one JSON document (version 1), or lines for people."""

from __future__ import annotations

import json as json_format
import shlex
import sys
from typing import TYPE_CHECKING, Any, TextIO

import typer

from branching._exit_codes import EXIT_NOTHING_SUCCEEDED, EXIT_TIMEOUT
from branching._sanitize import line_for
from branching.cli.error_handling import JSON_VERSION, note
from branching.errors import BranchingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from branching.cli.pattern_command import Search
    from branching.fs import Change
    from branching.patterns import SpeculationOutcome, SpeculationResult
    from branching.patterns.results import State

WARNINGS_MAX = 10
"""So many are printed; a JSON document has all."""
LETTERS = {
    "added": "A",
    "modified": "M",
    "deleted": "D",
    "renamed": "R",
    "type": "T",
    "metadata": "m",
}
"""How a change is marked in a list of paths."""


def print_json(command: str, **facts: object) -> None:
    """Prints the document of a command. BranchingError if it cannot be written."""
    try:
        print(json_format.dumps({"version": JSON_VERSION, "command": command, **facts}), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BranchingError(
            f"{command} has ended, and what came of it could not be printed: {error.strerror}",
            hint="branching history and branching ls tell what was committed and kept",
        ) from error


def note_forgotten(branches: Sequence[str], *, is_dry_run: bool = False) -> None:
    """Prints which earlier commits can no longer be undone because of a commit."""
    could = "could" if is_dry_run else "can"
    for branch in branches:
        note(f"the commit of {branch!r} {could} no longer be undone: the history is full")


def note_privileges(changes: Sequence[Change]) -> None:
    """Prints these warnings, of the first few files."""
    from branching.fs import privilege_warnings

    for warning in privilege_warnings(changes, WARNINGS_MAX):
        note(warning)


def warning_facts(changes: Sequence[Change]) -> dict[str, list[str]]:
    """Returns the field of a document that has these warnings, if there are any."""
    from branching.fs import privilege_warnings

    warnings = privilege_warnings(changes)
    return {"warnings": warnings} if warnings else {}


def note_rest(branch: str, remaining: int) -> None:
    """Prints how many changed paths a commit left in its branch, and what to do with them."""
    if remaining:
        paths = "1 changed path was" if remaining == 1 else f"{remaining} changed paths were"
        note(
            f"branch {branch} stays open: {paths} not committed; see branching diff "
            f"{shlex.quote(branch)}, then branching commit or branching abort it"
        )


def finish(
    search: Search, outcome: SpeculationOutcome, lines: Sequence[str], facts: dict[str, Any]
) -> None:
    """Prints what came out of a search, and ends the command with its exit code.

    `lines` are for people; `facts` is the command's own part of the document.
    """
    kept = _kept(outcome)
    note_privileges(outcome.changes)
    if outcome.branch is not None:
        note_rest(outcome.branch.name, outcome.remaining)
    if search.options.json:
        print_json(
            search.command,
            committed=outcome.committed,
            **facts,
            winner_index=None if outcome.winner is None else outcome.winner.branch_index,
            candidate_count=len(outcome.all_results),
            action=_action(outcome),
            kept=kept,
            changes=change_facts(outcome.changes),
            remaining=outcome.remaining,
            **warning_facts(outcome.changes),
        )
    else:
        for line in lines:
            print(line_for(sys.stdout, line))
        if kept:
            print(f"kept: {' '.join(kept)}")
        if search.options.verbose:
            for line in change_lines(outcome.changes):
                print(f"  {line}")
        sys.stdout.flush()
    raise typer.Exit(exit_code(outcome))


def finish_ranked(search: Search, outcome: SpeculationOutcome) -> None:
    """Does the same for a search by levels, whose candidates are known only when it is over."""
    winner = outcome.winner
    said = "no candidate succeeded"
    if winner is not None:
        said = f"winner: candidate {winner.branch_index} (score: {winner.score:.2f})"
    facts = {
        "winner": winner and {"index": winner.branch_index, "score": winner.score},
        "results": [result_facts(each, score=each.score) for each in outcome.all_results],
    }
    finish(search, outcome, [said, *result_lines(outcome, labels=True, scores=True)], facts)


def why_not(result: SpeculationResult) -> str | None:
    """Returns in a few words why a candidate did not succeed, None if it did."""
    if result.success:
        return None
    if result.state == "cancelled":
        return "cancelled" if result.branch_path else "not started"
    if result.state == "timed_out":
        return f"timed out after {result.duration:.1f} s"
    reason = getattr(result.return_value, "reason", None)
    if isinstance(reason, str) and result.exception is None:
        return reason
    return str(result.exception) if result.exception else "failed"


def result_lines(outcome: SpeculationOutcome, *, labels: bool, scores: bool) -> list[str]:
    """Returns a line for each candidate: `  [0] fail: CMD (exit 3)`, `  [1] ok   (0.50)`.

    A candidate that was stopped because another one won has not failed: `  [2] cancelled: CMD`.
    """
    lines = []
    for result in outcome.all_results:
        error = why_not(result)
        if error is None or result.state == "cancelled":
            verdict, why = error or "ok", ""
        else:
            verdict, why = "fail", f" ({error})"
        if scores:
            label = f" {result.label}" if labels else ""
            lines.append(f"  [{result.branch_index}] {verdict:<4} ({result.score:.2f}){label}{why}")
        else:
            label = f": {result.label}" if labels else ""
            lines.append(f"  [{result.branch_index}] {verdict}{label}{why}")
    return lines


def ended_how(value: object, state: State | None = None) -> str | None:
    """Returns what ended a command ("exit", "signal", "oom", ...), by what came back from it, or by
    the state of what we ended ourselves; None if it never ran.
    """
    how = getattr(value, "how", None)
    return how if isinstance(how, str) else _ENDED_BY_US.get(state or "")


_ENDED_BY_US = {"timed_out": "timeout", "cancelled": "cancelled"}


def result_facts(result: SpeculationResult, **more: object) -> dict[str, object]:
    """Returns one entry of a document's `results`."""
    error = why_not(result)
    changes = result.changes
    return {
        "index": result.branch_index,
        "success": result.success,
        **more,
        **({} if error is None else {"error": error}),
        "state": result.state,
        "ended": ended_how(result.return_value, result.state if result.branch_path else None),
        "exit_code": result.exit_code,
        "seconds": round(result.duration, 3),
        "label": result.label,
        "branch": result.branch_name,
        "changes": None if changes is None else vars(changes),
    }


def change_facts(changes: Sequence[Change]) -> list[dict[str, object]]:
    """Returns the changed paths as a document has them."""
    return [
        {
            "path": change.path,
            "change": change.change,
            "kind": change.kind,
            **({"from": change.origin} if change.origin else {}),
            **({"privileges": list(change.privileges)} if change.privileges else {}),
        }
        for change in changes
    ]


def change_lines(changes: Sequence[Change], stream: TextIO | None = None) -> list[str]:
    """Returns the changed paths as lines to print on `stream`, by default standard output: a
    letter and the path."""
    return [
        line_for(
            stream or sys.stdout,
            f"{LETTERS.get(change.change, '?')} {change.path}"
            + (f" (from {change.origin})" if change.origin else ""),
        )
        for change in changes
    ]


def exit_code(outcome: SpeculationOutcome) -> int:
    """0 there is a winner, 124 the time was over before one did, 1 nothing succeeded."""
    if outcome.winner is not None:
        return 0
    if any(result.state == "timed_out" for result in outcome.all_results) or outcome.timed_out:
        return EXIT_TIMEOUT
    return EXIT_NOTHING_SUCCEEDED


def _kept(outcome: SpeculationOutcome) -> list[str]:
    """Returns the names of the branches that are still open."""
    if outcome.branch is not None:
        return [outcome.branch.name] if outcome.branch.is_open else []
    return [result.branch_name for result in outcome.all_results if result.kept]


def _action(outcome: SpeculationOutcome) -> str:
    if outcome.committed:
        return "committed"
    return "kept" if _kept(outcome) else "aborted"
