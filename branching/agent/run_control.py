"""What can be done to the run of one branch, while its fork is open."""

from __future__ import annotations

import asyncio

from branching._threads import run_in_thread
from branching.agent.approvals import ApprovalRequest
from branching.agent.errors import ForkStateError
from branching.agent.protocols import Answer, History, Judgement
from branching.agent.queries import ForkView
from branching.agent.types import BranchState


class ForkRuns(ForkView):
    """Stops, steers, approves and continues runs."""

    judged: dict[str, Judgement]
    """Cached answers of judges, invalid when a branch continues."""
    _lock: asyncio.Lock

    async def run_on_branch(self, branch_id: str, message: str) -> asyncio.Task[None]:
        """Goes on with a branch that is done. Returns the task of the run, which never raises.

        ValueError for an unknown branch, ForkStateError for one that is not done.
        """
        async with self._lock:
            session, branch = self._open(), self._known(branch_id)
            if branch.status.state != "done":
                raise ForkStateError(
                    f"branch {branch_id} is {branch.status.state}; only a branch that is done "
                    "can continue"
                )
            self.judged.clear()
            assert session.supervisor is not None, "an open fork is attended"
            return session.supervisor.start(branch, message)

    async def run_again(self, branch_id: str) -> asyncio.Task[None]:
        """Runs a branch again that has ended without being done.

        It starts with its prompt, the parent's history and the files at the fork. Its changes are
        lost; its usage still counts.

        Returns:
            The task of the run, which never raises.

        Raises:
            ValueError: The branch is unknown.
            ForkStateError: The branch is running or done.
        """
        async with self._lock:
            session, branch = self._open(), self._known(branch_id)
            if branch.status.state in ("running", "done"):
                raise ForkStateError(f"branch {branch_id} is {branch.status.state}")
            self.judged.clear()
            assert session.supervisor is not None, "an open fork is attended"
            await run_in_thread(lambda: session.fork.make_anew(branch))
            return session.supervisor.start(branch, branch.spec.steer)

    async def terminate_branch(
        self, branch_id: str, reason: tuple[BranchState, str] | str | None = None
    ) -> None:
        """Stops a branch that runs; one that does not is left as it is.

        `reason` is the state and the error text that it gets; a text alone is the error text, and
        the state is `terminated`. ValueError for an unknown branch.
        """
        if isinstance(reason, str):
            reason = ("terminated", reason)
        async with self._lock:
            branch = self._known(branch_id)
            if self._session is not None and self._session.supervisor is not None:
                await self._session.supervisor.stop(branch, *(reason or ("terminated", None)))

    def steer(self, branch_id: str, text: str) -> None:
        """Tells a running branch something. ValueError if it is unknown, ForkStateError if it does
        not run."""
        branch = self._known(branch_id)
        if not branch.is_running or branch.runner is None:
            raise ForkStateError(
                f"branch {branch_id} is {branch.status.state} and cannot receive messages"
            )
        branch.runner.steer(text)

    def answer(self, branch_id: str, request: ApprovalRequest, answer: Answer) -> None:
        """Answers a request. ValueError if it is not open."""
        self._known(branch_id).approvals.answer(request, answer)

    def capture_partial_history(self, branch_id: str, messages: History) -> None:
        """Keeps a branch's conversation as it is now. An unknown id is ignored."""
        if branch := self.branches.get(branch_id):
            branch.capture(messages)
