"""What a branch asks its people: approvals. The run waits until one is answered.

Belongs to the event loop of the fork. A request goes when it is answered, or when the run that
asked is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from branching.agent.protocols import Answer


@dataclass(frozen=True, kw_only=True, eq=False)
class ApprovalRequest:
    """A tool call that waits for a person."""

    tool: str
    arguments: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the front end wants to show."""

    def __str__(self) -> str:
        return f"{self.tool} {self.arguments}".rstrip()


class Approvals:
    """The open requests of one branch."""

    def __init__(self, branch_id: str) -> None:
        self._branch_id = branch_id
        self._waiting: dict[ApprovalRequest, asyncio.Future[Answer]] = {}
        self.blocked: list[str] = []
        """What was denied, in order."""
        self.always: Answer | None = None
        """The reason of a denial in a fork that is resolved without a person."""

    def pending(self) -> list[ApprovalRequest]:
        return list(self._waiting)

    async def ask(self, request: ApprovalRequest) -> Answer:
        if self.always is not None:
            return self._recorded(request, self.always)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        try:
            return self._recorded(request, await answer)
        finally:
            self._waiting.pop(request, None)

    def answer(self, request: ApprovalRequest, answer: Answer) -> None:
        """Approves a request, so that its run continues. Raises ValueError if it is not open."""
        waiting = self._waiting.get(request)
        if waiting is None or waiting.done():
            raise ValueError(f"branch {self._branch_id} does not ask for {request}")
        waiting.set_result(answer)

    def refuse(self) -> None:
        """Denies all open and future requests."""
        self.always = "deny"
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result("deny")

    def _recorded(self, request: ApprovalRequest, answer: Answer) -> Answer:
        if answer == "deny":
            self.blocked.append(str(request))
        return answer
