"""What a command prints at its end: one JSON document (version 1), or lines for people.

The result of a command is one line on standard error: a mark, what was done, and the command that
goes on from there. Data, such as lists of paths, are on standard output.
"""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, TextIO

from branching._exit_codes import EXIT_NOTHING_SUCCEEDED, EXIT_TIMEOUT
from branching._sanitize import line_for
from branching.cli.error_handling import JSON_VERSION, note
from branching.cli.hints import race_advice
from branching.errors import BranchingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from branching.cli.pattern_command import Search
    from branching.fs import Change
    from branching.patterns import SpeculationOutcome, SpeculationResult
    from branching.patterns.results import State

LETTERS = {
    "added": "A",
    "modified": "M",
    "deleted": "D",
    "renamed": "R",
    "type": "T",
    "metadata": "m",
}
"""How a change is marked in a list of paths."""
_LETTER_COLOURS = {"A": "green", "M": "yellow", "D": "red", "R": "cyan", "T": "magenta"}
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}
"""The parameter of the control sequence of each colour. Typer's own takes a long import."""
_BOLD = "\x1b[1m"
LISTED_PATHS_MAX = 20
"""Longer lists of paths are cut where they only accompany a result."""

_MARKS = {True: ("✓", "ok:", "green"), False: ("✗", "failed:", "red")}
"""By success: the mark, the word in its place where the encoding lacks it, and the colour."""
_SEPARATOR, _ASCII_SEPARATOR = " · ", " - "


def is_coloured(stream: TextIO) -> bool:
    """Returns whether output to `stream` may have colours: a terminal, and nobody objects."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def _style(text: str, colour: str, *, bold: bool = False) -> str:
    return f"\x1b[{_COLOURS[colour]}m{_BOLD if bold else ''}{text}\x1b[0m"


def note_result(*parts: str, good: bool = True) -> None:
    """Prints the result of a command as one line on standard error.

    Args:
        parts: What was done, then what can be done next. Empty parts are left out.
        good: Whether the command did what it is for.
    """
    mark, word, colour = _MARKS[good]
    separator = _SEPARATOR
    try:
        f"{mark}{separator}".encode(sys.stderr.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        mark, separator = word, _ASCII_SEPARATOR
    if is_coloured(sys.stderr):
        mark = _style(mark, colour, bold=True)
    note(f"{mark} {separator.join(filter(None, parts))}")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns a number with its noun: `1 path`, `2 paths`."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def paths_phrase(changes: Sequence[Change]) -> str:
    """Returns the number of changed paths, with the kinds of change: `3 paths (+1 ~1 -1)`."""
    from branching.fs import DiffSummary

    kinds = f" ({DiffSummary.of(changes).short})" if changes else ""
    return counted(len(changes), "path") + kinds


def commit_parts(changes: Sequence[Change], *, can_undo: bool) -> list[str]:
    """Returns the parts of a result that tell of a commit."""
    if not changes:
        return ["nothing to commit: no path was changed"]
    return [f"committed {paths_phrase(changes)}", *(["undo: branching undo"] if can_undo else [])]


def shortened_lines(changes: Sequence[Change], stream: TextIO | None = None) -> list[str]:
    """Returns the first changed paths as lines to print on `stream`, by default standard output,
    and how many more there are."""
    lines = [f"  {line}" for line in change_lines(changes[:LISTED_PATHS_MAX], stream)]
    if (rest := len(changes) - LISTED_PATHS_MAX) > 0:
        lines.append(f"  ... and {rest} more (--json lists all)")
    return lines


def size_phrase(size: int) -> str:
    """Returns a number of bytes in the unit that fits: `4.1 kB`."""
    from rich.filesize import decimal

    return decimal(size)


def print_json(command: str, **facts: object) -> None:
    """Prints the document of a command. BranchingError if it cannot be written."""
    try:
        print(json_format.dumps({"version": JSON_VERSION, "command": command, **facts}), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BranchingError(
            f"{command} has ended, but its result could not be printed: {error.strerror}",
            hint="branching history and branching ls show what was committed and kept",
        ) from error


def note_forgotten(branches: Sequence[str], *, is_dry_run: bool = False) -> None:
    """Prints which earlier commits can no longer be undone because of a commit."""
    could = "could" if is_dry_run else "can"
    for branch in branches:
        note(f"the commit of {branch!r} {could} no longer be undone: the history is full")


def note_privileges(changes: Sequence[Change]) -> None:
    """Prints these warnings, of the first few files."""
    from branching.fs import PRIVILEGE_WARNINGS_MAX, privilege_warnings

    for warning in privilege_warnings(changes, PRIVILEGE_WARNINGS_MAX):
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
    search: Search,
    outcome: SpeculationOutcome,
    lines: Sequence[str],
    facts: dict[str, Any],
    *,
    noun: str = "candidate",
    score: bool = False,
) -> None:
    """Prints what came out of a search, and ends the command with its exit code.

    Args:
        search: The search, which has ended.
        outcome: Its outcome.
        lines: One for each candidate. They are left out where a table on the same terminal has
            shown them.
        facts: The command's own part of the document.
        noun: What the command calls a candidate.
        score: Name the score of the winner.
    """
    kept = _open_branches(outcome)
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
            commit=outcome.commit_id,
            remaining=outcome.remaining,
            **warning_facts(outcome.changes),
        )
    else:
        for line in [] if search.shows_table and sys.stdout.isatty() else lines:
            print(line_for(sys.stdout, line))
        if kept:
            print(f"kept: {' '.join(kept)}")
        if search.options.verbose:
            for line in change_lines(outcome.changes):
                print(f"  {line}")
        sys.stdout.flush()
        _note_outcome(outcome, kept, noun=noun, score=score)
        for hint in race_advice(search.refused) if outcome.winner is None else ():
            note(f"Hint: {hint}")
    raise SystemExit(exit_code(outcome))


def _note_outcome(outcome: SpeculationOutcome, kept: list[str], *, noun: str, score: bool) -> None:
    winner = outcome.winner
    if winner is None:
        said = f"no {noun} succeeded" + (" in time" if outcome.timed_out else "")
        rest = [f"kept {len(kept)} branches: branching ls"] if kept else ["nothing was changed"]
    else:
        said = f"{noun} {winner.branch_index} won" + (f" ({winner.score:.2f})" if score else "")
        if outcome.committed:
            rest = commit_parts(outcome.changes, can_undo=outcome.commit_id is not None)
        elif outcome.branch is not None and outcome.branch.is_open:
            name = shlex.quote(kept[0])
            rest = [f"kept branch {kept[0]}", f"commit: branching commit {name}"]
        else:
            rest = ["aborted, nothing was changed"]
    note_result(said, *rest, good=winner is not None)
    losers = [name for name in kept if outcome.branch is None or name != outcome.branch.name]
    if winner is not None and losers:
        note(
            f"Hint: {counted(len(losers), 'branch', 'branches')} of other candidates kept: "
            "branching diff NAME, branching commit NAME --rebase, branching abort NAME"
        )


def finish_ranked(search: Search, outcome: SpeculationOutcome) -> None:
    """Does the same for a search by levels, whose candidates are known only when it is over."""
    winner = outcome.winner
    facts = {
        "winner": winner and {"index": winner.branch_index, "score": winner.score},
        "results": [result_facts(each, score=each.score) for each in outcome.all_results],
    }
    lines = result_lines(outcome, labels=True, scores=True)
    finish(search, outcome, lines, facts, score=True)


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
        "ended": ended_how(
            result.return_value, result.state if result.branch_path or result.node else None
        ),
        "exit_code": result.exit_code,
        "seconds": round(result.duration, 3),
        "label": result.label,
        "branch": result.branch_name,
        "changes": None if changes is None else vars(changes),
        **({"node": result.node} if result.node else {}),
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


def coloured_change(line: str) -> str:
    """Returns a line of `change_lines`, with its letter in colour if the output has colours."""
    colour = _LETTER_COLOURS.get(line[:1])
    if colour is None or not is_coloured(sys.stdout):
        return line
    return _style(line[0], colour) + line[1:]


def exit_code(outcome: SpeculationOutcome) -> int:
    """0 there is a winner, 124 the time was over before one did, 1 nothing succeeded."""
    if outcome.winner is not None:
        return 0
    if any(result.state == "timed_out" for result in outcome.all_results) or outcome.timed_out:
        return EXIT_TIMEOUT
    return EXIT_NOTHING_SUCCEEDED


def _open_branches(outcome: SpeculationOutcome) -> list[str]:
    """Returns the names of the branches that are still open."""
    names = [result.branch_name for result in outcome.all_results if result.kept]
    branch = outcome.branch
    if branch is None:
        return names
    # It was closed after the call if the winner is to be dropped.
    winner = [branch.name] if branch.is_open else []
    return winner + [name for name in names if name != branch.name]


def _action(outcome: SpeculationOutcome) -> str:
    if outcome.committed:
        return "committed"
    return "kept" if _open_branches(outcome) else "aborted"
