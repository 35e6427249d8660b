"""What a command prints at its end: one JSON document (version 1), or lines for people."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING

from branching.cli.failure import EXIT_NOTHING_SUCCEEDED, EXIT_TIMEOUT

if TYPE_CHECKING:
    from branching.patterns import SpeculationOutcome, SpeculationResult

JSON_VERSION = 1


def print_json(command: str, **facts: object) -> None:
    """Prints the document of a command."""
    print(json_format.dumps({"version": JSON_VERSION, "command": command, **facts}), flush=True)


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


def result_facts(result: SpeculationResult, **more: object) -> dict[str, object]:
    """Returns one entry of a document's `results`."""
    error = why_not(result)
    return {
        "index": result.branch_index,
        "success": result.success,
        **more,
        **({} if error is None else {"error": error}),
        "state": result.state,
        "exit_code": result.exit_code,
        "seconds": round(result.duration, 3),
    }


def exit_code(outcome: SpeculationOutcome) -> int:
    """0 committed, 124 the time was over before anything succeeded, 1 nothing succeeded."""
    if outcome.committed:
        return 0
    if any(result.state == "timed_out" for result in outcome.all_results):
        return EXIT_TIMEOUT
    return EXIT_NOTHING_SUCCEEDED
