"""What is passed into the core, so that it knows no language model: each a small Protocol.

BranchRunner        runs one branch: a model with tools, a command-line program
ConversationCodec   knows what a conversation is made of
ForkStateStore      keeps what must survive a restart
CheckpointStore     keeps conversations with the files that belong to them
Judge               chooses a winner

What is made or asked for one branch (`RunnerFactory`, `Tester`) stands with it, in
`branch_runtime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from branching.agent.types import (
    BranchDiffReport,
    BranchOutcome,
    ConfidenceSignals,
    MergeStrategy,
    Usage,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

    from branching.agent.checkpoint import Checkpoint
    from branching.agent.fork_state import ForkState

History = Any
"""A conversation. The core hands it around and asks the codec about it; it never looks inside."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The result of a run that ended normally."""

    history: History
    """All of the conversation: what the branch was given, and what it added."""
    output: object = None
    final_message: str = ""


class BranchRunner(Protocol):
    """Runs one branch. Made once for it by a `RunnerFactory`, and used for all its turns."""

    async def run(self, prompt: str, history: History) -> RunOutcome:
        """Continues `history` with `prompt` until the run ends.

        The runner reserves each request (`branch.request()`), reports the conversation
        (`branch.capture()`), and asks for approval (`branch.ask()`). It must not catch
        BudgetExhausted or CancelledError. Any other exception is a failure of the branch.
        """

    def steer(self, text: str) -> None:
        """Sends a message to the running run. Raises ForkStateError if it cannot receive one."""

    async def stop(self) -> None:
        """Ends all that the run started, and returns when that is dead. May be called again.

        The task that runs `run` is cancelled by the coordinator, after this.
        """


class InnerForks(Protocol):
    """The forks that a branch's run has made itself."""

    @property
    def is_resolved(self) -> bool:
        """None is open."""

    async def aclose(self) -> None:
        """Ends them."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call of a tool, for comparing what branches did."""

    name: str
    arguments: str = ""
    """As text; equal text is the same call."""


class ConversationCodec(Protocol):
    """Knows what a conversation is made of."""

    def dump(self, history: History) -> bytes:
        """Returns it as bytes that `load` takes, also in another process."""

    def load(self, data: bytes) -> History:
        """Raises ValueError for bytes that are no conversation."""

    def copy(self, history: History) -> History:
        """Returns a copy that shares nothing that can change."""

    def turns(self, history: History) -> int:
        """Counts the answers of the model."""

    def preview(self, history: History) -> str:
        """Returns the last message as one line of text, "" if there is no message."""

    def tool_calls(self, history: History) -> Sequence[ToolCall]:
        """Lists the calls of tools, in order."""

    def retries(self, history: History) -> int:
        """Counts the times that the model was asked to try again."""

    def stuck_loop_hits(self, history: History) -> int:
        """Counts the warnings that the model runs in circles."""


class ForkStateStore(Protocol):
    """Keeps the state of forks, by fork id. Each call is whole or raises ForkStoreError."""

    home: Path | None
    """Directory for archives beside the states; None if the states are in memory."""

    def save(self, state: ForkState) -> None: ...
    def get(self, fork_id: str) -> ForkState | None: ...
    def list_all(self) -> list[ForkState]:
        """Lists them, the oldest first."""

    def remove(self, fork_id: str) -> None:
        """Removes the state. A missing one is no error."""


class CheckpointStore(Protocol):
    """Keeps checkpoints, by id. It may forget the oldest ones."""

    def save(self, checkpoint: Checkpoint) -> None: ...
    def get(self, checkpoint_id: str) -> Checkpoint | None: ...
    def newest(self, branch: str | None) -> Checkpoint | None:
        """Returns the newest checkpoint of a branch, or of main."""

    def list_all(self) -> list[Checkpoint]:
        """Lists them, the oldest first."""

    def remove(self, checkpoint_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a judge is asked."""

    goal: str
    report: BranchDiffReport
    outcomes: Sequence[BranchOutcome]
    strategy: MergeStrategy


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What a judge, or a panel of them, answers."""

    verdict: Verdict
    signals: ConfidenceSignals | None = None
    effective_confidence: float
    usage: Usage = field(default_factory=Usage)


class Judge(Protocol):
    """Chooses a winner; for the kind `vote` it asks a panel and counts."""

    async def __call__(self, question: Question) -> Judgement: ...


Answer = Literal["approve", "deny"]
