"""Background commands in branches. They run until they end, are stopped, or reach a time limit.

Each command has its own thread. Its state is changed in the event loop's thread only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import anyio

from branching._cancellation import STOP_GRACE_SECONDS, CancelScope
from branching.errors import BranchError, BranchingError
from branching.mcp.bounded_output import BoundedOutput
from branching.mcp.execution import log_name, logged, program
from branching.mcp.worker_threads import run_short, start_thread
from branching.mcp.workspace_session import WorkspaceSession
from branching.process import Ended
from branching.process.port_ranges import PORTS_EACH, reserve_ports

RUNNING_MAX = 32
ENDED_MAX = 32
"""How many ended commands keep their output for `branch_output`. The run logs have more."""
POLL_SECONDS = 0.05
PORTS = PORTS_EACH


class Started:
    """A command in the background."""

    def __init__(self, branch: str, command: str, port_base: int) -> None:
        self.id = f"bg-{secrets.token_hex(3)}"
        self.branch = branch
        self.command = command
        self.port_base = port_base
        self.log = log_name(branch)
        self.output = BoundedOutput()
        self.scope = CancelScope()
        self.has_ended = anyio.Event()
        self.ended: Ended | None = None
        self.error: str | None = None
        """Why it could not be started, or None."""

    @property
    def is_running(self) -> bool:
        return not self.has_ended.is_set()


async def start(session: WorkspaceSession, name: str, command: str, *, seconds: float) -> Started:
    """Starts a command in a branch. Raises BranchError if `RUNNING_MAX` commands are running."""
    branch = await session.find(name)
    running = [each for each in session.background.values() if each.is_running]
    if len(running) >= RUNNING_MAX:
        raise BranchError(
            f"nothing was started: {RUNNING_MAX} commands run in the background",
            hint="branch_stop one of them; branch_list names them",
        )
    ports = reserve_ports()
    started = Started(name, command, await run_short(ports.__enter__))
    candidate = program(session, command, port_base=started.port_base)
    call = logged(session, branch, candidate, started.log, seconds, started.output)
    end = session.begin(name, started.scope)

    def finish() -> None:
        end()
        started.has_ended.set()

    def work() -> None:
        try:
            started.ended = started.scope.run(call)
        except (BranchingError, OSError) as error:
            started.error = str(error)
        finally:
            ports.__exit__(None, None, None)

    session.background[started.id] = started
    _forget_oldest(session)
    start_thread(work, name=started.id, on_end=finish)
    return started


async def wait(
    started: Started, seconds: float, until: Callable[[str], bool] = lambda _: False
) -> None:
    """Waits until a command has ended, `until(output)` is true, or `seconds` have passed."""
    with anyio.move_on_after(seconds):
        while started.is_running and not until(started.output.text):
            with anyio.move_on_after(POLL_SECONDS):
                await started.has_ended.wait()


async def stop(started: Started) -> None:
    """Ends a command with all its processes, and waits until they have ended."""
    started.scope.cancel(STOP_GRACE_SECONDS)
    with anyio.CancelScope(shield=True):
        await started.has_ended.wait()


def find(session: WorkspaceSession, number: str) -> Started:
    """Returns a command by its id. Raises BranchError if there is none."""
    try:
        return session.background[number]
    except KeyError:
        known = ", ".join(session.background) or "none"
        raise BranchError(
            f"there is no command {number!r} in the background (known: {known})",
            hint="branch_list names those that run; the log of an older one is in "
            "branching://logs/NAME",
        ) from None


def _forget_oldest(session: WorkspaceSession) -> None:
    ended = [each.id for each in session.background.values() if not each.is_running]
    for number in ended[: max(0, len(ended) - ENDED_MAX)]:
        del session.background[number]
