"""`!command`: a line for the shell, run where the open tab works, in the sandbox of that place."""

from __future__ import annotations

from pathlib import Path

from branching.agent.branch_runtime import BranchRuntime
from branching.agent.coordinator import ForkCoordinator
from branching.agent.run_program import RunSettings, run_program
from branching.errors import BranchError

OUTPUT_BYTES_MAX = 64 << 10
SECONDS_MAX = 600.0
"""A line that takes longer is a program; it has a terminal of its own."""


class Shell:
    """The shell of one chat."""

    def __init__(self, coordinator: ForkCoordinator, *, seen_at: Path | None) -> None:
        self._coordinator = coordinator
        self._seen_at = seen_at

    async def __call__(self, line: str, branch: BranchRuntime | None) -> str:
        """Runs it; returns what it printed, and its exit code unless that is 0."""
        directory = self._coordinator.parent_path if branch is None else branch.path
        if directory is None:
            raise BranchError("this chat has no files")
        printed = bytearray()

        def take(arrived: bytes) -> None:
            printed.extend(arrived[: OUTPUT_BYTES_MAX - len(printed)])

        environment = {} if branch is None else branch.environment
        place = RunSettings(directory=directory, seen_at=self._seen_at, environment=environment)
        ended = await run_program(line, place, stdout=take, stderr=take, timeout=SECONDS_MAX)
        text = printed.decode("utf-8", "replace")
        if len(printed) >= OUTPUT_BYTES_MAX:
            text += f"\n[what follows {OUTPUT_BYTES_MAX} bytes is left out]\n"
        return text if ended.success else f"{text}[{ended.reason}]"
