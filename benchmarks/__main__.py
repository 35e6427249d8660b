"""The command: `scripts/bench --help`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from .attempts import FILES, ROUNDS, measure
from .contestants import everybody
from .field.figures import RUNS_MIN
from .field.page import NoPlace, around, figures, fill
from .field.picture import bars
from .field.race import race
from .field.report import document, machine
from .field.sizes import SIZES
from .workloads import ALL


def main(arguments: list[str] | None = None) -> int:
    names = [one.name for one in everybody()]
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures branches beside the field, in one run, and leaves nothing behind. "
        "It mounts and empties caches, so it runs as root. Tables go to standard output.",
    )
    parser.add_argument(
        "--mode",
        choices=[*SIZES, "attempts"],
        default="quick",
        help="how much (%(default)s); attempts: what one attempt costs in a large tree, with "
        "--files, --runs, --place and --quiet alone",
    )
    parser.add_argument(
        "--files",
        type=int,
        default=FILES,
        metavar="N",
        help="files of the tree of --mode attempts (%(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        metavar="N",
        help=f"runs of each, {RUNS_MIN} or more, however long they take",
    )
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="workloads whose name has this word"
    )
    parser.add_argument(
        "--contestant", action="append", choices=names[1:], help="native and these alone"
    )
    parser.add_argument(
        "--place", type=Path, help="a directory on the disk to measure (the temporary one)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture here")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="fill the place for figures in this page"
    )
    parser.add_argument(
        "--read", type=Path, metavar="FILE", help="measure nothing, take what --json wrote here"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    options = parser.parse_args(arguments)
    if options.page:
        try:
            around(options.page)  # not after half an hour
        except NoPlace as reason:
            parser.error(str(reason))
    if options.read:
        _write(json.loads(options.read.read_text()), options)
        return 0

    if options.runs is not None and options.runs < RUNS_MIN:
        parser.error(f"a ratio takes {RUNS_MIN} runs or more: one says nothing about the next")
    # git must not find anybody's settings, and a path in a socket's name must be short.
    os.environ["GIT_CONFIG_GLOBAL"] = os.environ["GIT_CONFIG_SYSTEM"] = os.devnull
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of `finally`
    if options.mode == "attempts":
        return _attempts(options)
    size = SIZES[options.mode]
    if options.runs is not None:
        size = replace(size, runs=options.runs, minutes=float("inf"))
    workloads = [
        one for one in ALL if not options.only or any(word in one.name for word in options.only)
    ]
    if not workloads:
        parser.error(f"no workload is called so; there are: {', '.join(o.name for o in ALL)}")
    contestants = [
        one
        for one in everybody()
        if one.name == names[0] or not options.contestant or one.name in options.contestant
    ]
    if os.geteuid() != 0:
        parser.error("mounting a kernel overlayfs and emptying caches take root: use sudo")

    def tell(text: str) -> None:
        if not options.quiet:
            print(f"bench: {text}", file=sys.stderr, flush=True)

    about = machine(options.place or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="bb-", dir=options.place) as place:
        result = race(workloads, contestants, size, Path(place), tell)
    _write(document(result, [one.name for one in contestants], size, about), options)
    return 0


def _attempts(options: argparse.Namespace) -> int:
    about = machine(options.place or Path(tempfile.gettempdir()))

    def tell(text: str) -> None:
        if not options.quiet:
            print(f"bench: {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="bb-", dir=options.place) as place:
        figures = measure(Path(place), options.files, options.runs or ROUNDS, tell)
    print("".join(f"{name}: {value}\n" for name, value in about.items()))
    print(figures)
    return 0


def _write(data: dict[str, object], options: argparse.Namespace) -> None:
    if options.json:  # before all else: a page without a place must not cost the run
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(bars(data))
    if options.page:
        fill(options.page, data)
    print(figures(data))


if __name__ == "__main__":
    sys.exit(main())
