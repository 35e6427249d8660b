"""The parent's conversation: one run at a time, written to the transcript of the overview."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from branching.agent.approvals import ApprovalRequest, Approvals
from branching.agent.protocols import Answer
from branching.tui.chat.protocols import ChatAgent, Line
from branching.tui.chat.transcripts import OVERVIEW, Transcripts
from branching.tui.formatting import failure


class Conversation:
    """The conversation of one chat, without the messages of failed or stopped runs."""

    def __init__(
        self, chat_agent: ChatAgent, said: Transcripts, history: Any, on_said: Callable[[str], None]
    ) -> None:
        """`on_said` is told each prompt whose run has succeeded."""
        self.history = history
        self.approvals = Approvals(OVERVIEW)
        """What tools of the parent wait for."""
        self.prompt = ""
        """What was said to the agent last."""
        self._chat_agent = chat_agent
        self._said = said
        self._on_said = on_said
        self._run: asyncio.Task[None] | None = None

    @property
    def is_in_flight(self) -> bool:
        """A run is under way."""
        return self._run is not None

    async def say(self, text: str) -> None:
        """Says something to the agent, and returns when its run has ended, whatever came of it."""
        assert self._run is None, "one run at a time"
        self._said.add(OVERVIEW, Line("you", text))
        self.prompt = text
        self._run = asyncio.create_task(self._respond(text))
        await asyncio.wait([self._run])
        self._run = None

    def stop(self) -> None:
        """Stops the run, if there is one. Does not wait."""
        if self._run is not None:
            self._run.cancel()

    async def close(self) -> None:
        """Stops the run, and returns when it has ended."""
        self.stop()
        if self._run is not None:
            await asyncio.wait([self._run])

    async def _respond(self, text: str) -> None:
        is_told = False

        def hear(piece: str) -> None:
            nonlocal is_told
            is_told = True
            self._said.heard(OVERVIEW, piece)

        try:
            reply = await self._chat_agent.say(text, self.history, hear, self._ask)
        except asyncio.CancelledError:
            self._said.add(OVERVIEW, Line("note", "stopped"))
        except Exception as error:  # of the agent's model: the conversation is as it was
            self._said.add(OVERVIEW, Line("error", f"the run failed: {failure(error)}"))
        else:
            self.history = reply.history
            self._on_said(text)
            if not is_told:
                self._said.heard(OVERVIEW, reply.text)
            self._said.flush(OVERVIEW)

    async def _ask(self, tool: str, arguments: str) -> Answer:
        return await self.approvals.ask(ApprovalRequest(tool=tool, arguments=arguments))
