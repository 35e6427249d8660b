"""Running code in one interpreter of a session: what `Session` and `Child` have in common."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from branching._threads import run_in_thread
from branching.errors import ForkError, MemoryBranchError
from branching.process.functions import function_pickle
from branching.session.cell import Cell
from branching.session.interpreter import Interpreter, packed_call, packed_code

Code = str | Callable[..., object]
"""Python code, or a function."""


class CodeRunner:
    """Something that runs code in an interpreter."""

    def _running(self) -> Interpreter:
        """Returns the interpreter; MemoryBranchError if there is none."""
        raise NotImplementedError

    def _check_can_run(self) -> None:
        """Raises MemoryBranchError if the interpreter cannot run code now."""

    def run(
        self,
        code: Code,
        *arguments: object,
        timeout: float | None = None,
        accept: Sequence[type] = (),
    ) -> Cell:
        """Runs code, or calls a function, in the interpreter.

        Code runs in the `__main__` module. If its last line is an expression, numbers, text and
        containers of them come back as the value; of all other values, the `repr` does. A function
        is sent as to isolated candidates: with copies of all objects it refers to. Names that its
        module does not have are looked up among the variables of the interpreter.

        Args:
            code: Python code, or a function.
            *arguments: Arguments of the function.
            timeout: Seconds after which the code is interrupted. Default: no limit.
            accept: Classes whose instances may be part of the value of a function, even though
                they belong to installed packages or define their own unpickling.

        Returns:
            The outcome. An exception of the code is its `exception`; it is not raised.

        Raises:
            ForkError: The function cannot be sent. Nothing ran.
            MemoryBranchError: The interpreter has ended, or it is that of a session that has
                forked: run the code in a child.
            TimeoutError: The code was interrupted. The interpreter can still be used.
        """
        self._check_can_run()
        originals: Sequence[object] = ()
        if isinstance(code, str):
            if arguments:
                raise TypeError("arguments are for functions: code takes none")
            packed = packed_code(code)
        elif callable(code):
            self._check_version(code)
            packed, originals = packed_call(code, arguments)
        else:
            raise TypeError(f"code must be text or a function, not {code!r}")
        interpreter = self._running()
        with interpreter.busy:
            return interpreter.run(packed, originals, accept, timeout)

    def _check_version(self, function: Callable[..., object]) -> None:
        """Refuses to send byte code to an interpreter that does not understand it."""
        theirs, own = self._running().python, sys.implementation.cache_tag
        if theirs != own and function_pickle.is_own_code(getattr(function, "__module__", None)):
            raise ForkError(
                f"the function did not run: the session's interpreter is {theirs}, and this one is "
                f"{own}",
                hint="run code, or use an interpreter of the same version",
            )

    async def run_async(
        self,
        code: Code,
        *arguments: object,
        timeout: float | None = None,
        accept: Sequence[type] = (),
    ) -> Cell:
        """Does the same as `run` without blocking the event loop.

        Cancelling the task interrupts the code.

        Args:
            code: Python code, or a function.
            *arguments: Arguments of the function.
            timeout: Seconds after which the code is interrupted.
            accept: Classes whose instances may be part of the value.

        Returns:
            The outcome.
        """
        interpreter = self._running()
        return await run_in_thread(
            lambda: self.run(code, *arguments, timeout=timeout, accept=accept),
            on_cancel=lambda _: interpreter.interrupt(),
        )

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the code that runs. Safe to call from any thread."""
        self._running().interrupt()


def check_state(interpreter: Interpreter, what: str, *, allow_threads: bool) -> list[str]:
    """Raises MemoryBranchError if something is in the way. `what` says what was not done.

    Returns what a fork would share.
    """
    found: dict[str, Any] = interpreter.ask(b"check %d" % allow_threads)
    if refusals := found["refusals"]:
        raise MemoryBranchError(
            f"{what}, because of {'; '.join(refusals)}. Nothing was changed",
            hint="end or close it in the code, then try again"
            + ("" if allow_threads else "; allow_threads=True forks without the threads"),
        )
    return [f"{interpreter.name}: {text}" for text in found["warnings"]]


def unpark(interpreter: Interpreter) -> None:
    """Opens the files of a parked interpreter again, in the branch that it sees now."""
    answer = interpreter.ask(b"unpark")
    if failed := answer["not_opened"]:
        raise MemoryBranchError(
            f"{interpreter.name} continues, but could not reopen: {'; '.join(failed)}",
            hint="open these files again in the code",
        )


class not_busy:  # noqa: N801
    """Keeps code from starting in an interpreter; refuses if some runs."""

    def __init__(self, interpreter: Interpreter, what: str) -> None:
        self._interpreter = interpreter
        self._what = what

    def __enter__(self) -> None:
        if not self._interpreter.busy.acquire(blocking=False):
            raise MemoryBranchError(
                f"{self._interpreter.name} was not {self._what}: it still runs code. "
                "Nothing was changed",
                hint="wait for its end, or interrupt it",
            )

    def __exit__(self, *_: object) -> None:
        self._interpreter.busy.release()


def close_dead(interpreter: Interpreter) -> None:
    """Closes an interpreter that was killed, once nobody waits for its answer any more."""
    deadline = time.monotonic() + 10.0
    if interpreter.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
        try:
            interpreter.close()
        finally:
            interpreter.busy.release()
