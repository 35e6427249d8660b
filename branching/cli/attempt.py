"""`branching attempt`: one attempt of a command, on any machine that has its base."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from branching._exit_codes import EXIT_TIMEOUT
from branching.cli.error_handling import UsageFault, handle_errors, refuse_in_container
from branching.cli.limit_options import LimitOptions
from branching.cli.option_groups import expand_option_groups
from branching.cli.options import CommandArgument, EvaluateOption, JsonOption, TimeoutOption
from branching.cli.output import note_result, print_json, result_facts, size_phrase
from branching.cli.workspace import owned_workspace

if TYPE_CHECKING:
    from branching.patterns import SpeculationResult


@expand_option_groups
def attempt(
    command: CommandArgument = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|ARCHIVE",
            help="The base: a directory, or an archive of one (branching export --whole), which is "
            "unpacked once on each machine.",
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="LAYER",
            help="Layer to start from, applied on top of the base and earlier layers. Repeatable.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="LAYER",
            help=(
                "New file for the layer, which holds the command's changes. It is not written if "
                "the command fails."
            ),
            show_default=False,
        ),
    ] = None,
    index: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Number of the attempt, passed on as BRANCHING_ATTEMPT."
        ),
    ] = 0,
    evaluate: EvaluateOption = None,
    timeout: TimeoutOption = None,
    json: JsonOption = False,
    *,
    limits: LimitOptions,
) -> None:
    """Run a command in a branch of a base, and write its changes to a layer. Nothing is committed.

    A batch system, or a loop over ssh, can run attempts on any number of machines in this way.
    branching load creates a branch from the best layer on the machine that has the base; it
    refuses a layer that was made against other content. The exit code is that of branching run.

    Example: branching attempt --base base.tar --out 1.tar --index 1 --json -- ./solve.py
    """
    with handle_errors(json=json):
        refuse_in_container(
            "branching-docker cannot mount the base and the layers of an attempt: use branching "
            "on the host, or docker run with -v for their directories"
        )
        if not command:
            raise UsageFault("no command specified; use -- CMD...")
        if base is None or out is None:
            raise UsageFault("an attempt needs --base and --out")
        with ExitStack() as stack:
            files = [stack.enter_context(each.open("rb")) for each in layer or ()]
            file = stack.enter_context(out.open("xb"))
            try:
                result, digest = _run(
                    command,
                    base,
                    files,
                    file,
                    index=index,
                    evaluate=evaluate,
                    timeout=timeout,
                    limits=limits,
                    stdout=2 if json else 1,
                )
                size = file.tell() if result.success else None
            finally:
                if not file.tell():
                    out.unlink()  # nothing came of it
        if json:
            print_json(
                "attempt",
                **result_facts(result, score=result.score),
                base=digest,
                layer=None if size is None else {"path": str(out), "bytes": size},
            )
        else:
            code = _exit_code(result)
            written = "no layer" if size is None else f"wrote {out} ({size_phrase(size)})"
            note_result(f"exit code {code}" if code else "", written, good=size is not None)
        raise typer.Exit(_exit_code(result))


def _run(
    command: list[str],
    base: Path,
    layers: Sequence[IO[bytes]],
    out: IO[bytes],
    *,
    index: int,
    evaluate: str | None,
    timeout: float | None,
    limits: LimitOptions,
    stdout: int,
) -> tuple[SpeculationResult, str | None]:
    """Returns the result, and the digest of a base that is an archive."""
    from branching.cli.signals import run_interruptible
    from branching.cluster.base_cache import BaseCache, digest_of
    from branching.cluster.remote_attempt import Work, run_attempt
    from branching.patterns.command_callbacks import Scorer
    from branching.patterns.command_candidate import Program, shell

    with ExitStack() as stack:
        digest = None
        if not base.is_dir():
            digest = digest_of(base)
            base = stack.enter_context(BaseCache().unpacked(base, digest))
        space, owner = stack.enter_context(owned_workspace(base))
        scorer = None
        if evaluate:
            scorer = Scorer(
                shell(evaluate),
                workspace=space.seen_at,
                owner=owner,
                score=True,
                tells_output=False,
                stderr=2,
            )
        program = Program(
            command,
            workspace=space.seen_at,
            owner=owner,
            score=True,
            stdout=stdout,
            stderr=2,
            tells_output=False,
        )
        work = Work(
            candidate=program,
            index=index,
            evaluate=scorer,
            timeout=timeout,
            limits=limits.limits(),
        )
        result = run_interruptible(
            lambda: run_attempt(space, work, layers=layers, out=out).result(),
            is_done=lambda result: result.state != "cancelled",
        )
        out.flush()
        out.seek(0, 2)  # the archive was written through a copy of the descriptor
        return result, digest


def _exit_code(result: SpeculationResult) -> int:
    if result.state == "timed_out":
        return EXIT_TIMEOUT
    if result.state == "error" and result.exception is not None:
        print(f"error: {result.exception}", file=sys.stderr, flush=True)
        return result.exit_code or 1
    return result.exit_code
