"""What a race gave, as a document (JSON) and as tables (Markdown).

The document holds every sample, so that any figure can be worked out again. Values are in seconds
and bytes there, and in fitting units in the tables.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path

from .figures import RUNS_MIN, Spread, ratios
from .race import NATIVE, Result
from .sizes import Size

FORMAT = 2


def machine(place: Path) -> dict[str, object]:
    """Returns what the figures depend on; `place` is where the disk is measured."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "kernel": platform.release(),
        "processors": len(os.sched_getaffinity(0)),
        "model": model,
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024**2,
        "load_before": list(os.getloadavg()),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "commit": _said("git", "describe", "--always", "--dirty"),
        "file_system": _said("findmnt", "--noheadings", "--output=FSTYPE", "--target", place),
    }


def _said(*command: str | Path) -> str:
    here = Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def document(
    result: Result, names: list[str], size: Size, about: dict[str, object]
) -> dict[str, object]:
    """Returns the race as plain data."""
    workloads = []
    for workload, rows in result.rows.items():
        figures = []
        for row in rows:
            for name in names:
                entry = _entry(result, workload, row, name)
                if entry:
                    figures.append(entry)
        workloads.append(
            {
                "name": workload,
                "pinned": result.pinned[workload],
                "runs": result.runs[workload],
                "figures": figures,
                "not_run": result.not_run.get(workload),
                "refused": {
                    name: reason
                    for name in names
                    if (reason := result.refusals.get((workload, name)))
                },
                "fuse_requests": result.requests.get(workload, {}),
            }
        )
    return {
        "format": FORMAT,
        "mode": size.name,
        "machine": about,
        "contestants": names,
        "workloads": workloads,
    }


def _entry(result: Result, workload: str, row: str, name: str) -> dict[str, object] | None:
    samples = result.samples.get((row, name), [])
    entry: dict[str, object] = {"row": row, "contestant": name, "unit": result.units[row]}
    if len(samples) < result.runs[workload]:
        reason = result.refusals.get((row, name)) or result.refusals.get((workload, name))
        return {**entry, "cannot": reason} if reason else None
    spread = Spread.of(samples)
    entry |= {
        "samples": samples,
        "minimum": spread.minimum,
        "median": spread.median,
        "maximum": spread.maximum,
        "runs": spread.runs,
    }
    native = result.samples.get((row, NATIVE), [])
    if len(native) == len(samples) >= RUNS_MIN:
        ratio = ratios(samples, native)
        entry["ratio"] = {
            "minimum": ratio.minimum,
            "median": ratio.median,
            "maximum": ratio.maximum,
        }
    return entry


def runs_made(document: dict[str, object]) -> str:
    """Returns how many runs the workloads had, as words: "3 runs", or "2 to 5 runs"."""
    workloads = document["workloads"]
    assert isinstance(workloads, list)
    made = [workload["runs"] for workload in workloads if not workload["not_run"]] or [0]
    between = f"{min(made)} to " if min(made) < max(made) else ""
    return f"{between}{max(made)} runs"


def table(document: dict[str, object]) -> str:
    """Returns the document as Markdown: a table a workload, and below it who could not, and why."""
    lines = []
    workloads = document["workloads"]
    assert isinstance(workloads, list)
    for workload in workloads:
        placed = "daemon and client on one CPU" if workload["pinned"] else "not pinned"
        lines += [f"### {workload['name']}", ""]
        if workload["not_run"]:
            lines += [f"Not run: {workload['not_run']}.", ""]
            continue
        lines += [f"{workload['runs']} runs, {placed}.", ""]
        lines += [
            "| work | contestant | min | median | max | to native (min to max) |",
            "|---|---|--:|--:|--:|--:|",
        ]
        notes: dict[str, list[str]] = {}
        for figure in workload["figures"]:
            if "cannot" in figure:
                said = f"{figure['contestant']}: {figure['cannot']}"
                notes.setdefault(said, []).append(figure["row"])
                continue
            values = [
                readable(figure[key], figure["unit"]) for key in ("minimum", "median", "maximum")
            ]
            ratio = figure.get("ratio")
            compared = (
                f"{ratio['median']:.2f} ({ratio['minimum']:.2f} to {ratio['maximum']:.2f})"
                if ratio
                else ""
            )
            cells = [figure["row"], figure["contestant"], *values, compared]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for name, reason in workload["refused"].items():
            notes.setdefault(f"{name}: {reason}", [])
        for said, rows in notes.items():
            part = len(rows) < len({figure["row"] for figure in workload["figures"]})
            lines.append(
                f"- no figure of {said}" + (f" ({'; '.join(rows)})" if rows and part else "")
            )
        if requests := workload["fuse_requests"]:
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(requests.items()))
            lines.append(f"- requests to our fuse driver in one run: {counts}")
        lines.append("")
    return "\n".join(lines)


def readable(value: float, unit: str) -> str:
    """Returns a figure in the unit that fits."""
    if unit == "B":
        return f"{value / 1024**2:.1f} MiB"
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if value * factor >= 1 or name == "µs":
            return (
                f"{value * factor:.3g} {name}"
                if value * factor < 1000
                else f"{value * factor:.0f} {name}"
            )
    raise AssertionError("the last unit takes all")
