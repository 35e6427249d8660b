"""An agent behind HTTP, in a repository under git, killed in the middle of a fork, and resumed.

Everything is real except the model: the process and its SIGKILL, the branches, git, the client of
the model's server. Between the two processes, a file of the repository is edited.
"""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM, Mounted
from support.agents import branch_of, died

from branching import Workspace
from branching.agent.checkpoint import InMemoryCheckpointStore
from branching.agent.coordinator import ForkCoordinator
from branching.agent.fork_store import SQLiteForkStateStore
from branching.agent.pydantic_ai import AgentRunner, MessagesCodec

from .loopback import Reply, served
from .scripted import working_agent

SECONDS_MAX = 90
COMMIT = "git add -A && git -c user.name=a -c user.email=a@b commit -qm"

KILLED = f"""
    import threading
    from agent.loopback import Call, Reply, served
    from agent.scripted import working_agent
    from branching.agent.pydantic_ai import AgentRunner, MessagesCodec
    asked_again = threading.Event()

    def script(messages):
        label = "a" if any("go a" in str(m.get("content")) for m in messages) else "b"
        if not any(m["role"] == "tool" for m in messages):
            command = f"echo {{label}} > {{label}} && {COMMIT} {{label}}"
            return Reply(calls=(Call(name="shell", arguments={{"command": command}}),))
        if label == "b":
            asked_again.set()
            threading.Event().wait()
        return Reply(text="a is done")

    async def main():
        with served(script) as server:
            agent = working_agent(server.model())
            made = ForkCoordinator(
                runner=lambda branch: AgentRunner(agent, branch), codec=MessagesCodec(),
                place=workspace, store=store, checkpoint_store=InMemoryCheckpointStore(),
            )
            await made.fork(specs("a", "b"))
            await until(lambda: asked_again.is_set() and not branch_of(made, "a").is_running)
            await until(lambda: store.get(made.fork_id).branches[0].status.state == "done")
            now()
    asyncio.run(main())
"""


def git(top: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=top, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.contract("L1")
def test_a_killed_agent_resumes_with_its_conversation_and_commits(real: Mounted) -> None:
    git(real.base, "init", "-q", "-b", "main")
    subprocess.run(["sh", "-ec", f"{COMMIT} seed"], cwd=real.base, check=True)
    died(real.root, KILLED)
    (real.base / NAME_FROM).write_text("edited by somebody\n")

    async def work(workspace: Workspace, store: SQLiteForkStateStore) -> list[dict[str, Any]]:
        [kept] = store.list_all()
        with served(lambda _: Reply(text="amended")) as server:
            agent = working_agent(server.model())
            made = await ForkCoordinator.resume(
                kept.fork_id,
                store=store,
                runner=lambda branch: AgentRunner(agent, branch),
                codec=MessagesCodec(),
                place=workspace,
                checkpoint_store=InMemoryCheckpointStore(),
            )
            a, b = branch_of(made, "a"), branch_of(made, "b")
            assert (a.status.state, b.status.state) == ("done", "terminated")
            assert b.partial_history, "what it had said until its last request"
            await (await made.run_on_branch(a.id, "amend it"))
            merged = await made.merge_or_select(f"pick:{a.id}")
            assert merged.conflicts == ()
            assert "a" in merged.applied_paths
            await made.aclose()
            [request] = server.requests
            messages: list[dict[str, Any]] = request["messages"]
            return messages

    with Workspace(real.root) as workspace:
        store = SQLiteForkStateStore.beside(workspace)
        sent = asyncio.run(asyncio.wait_for(work(workspace, store), SECONDS_MAX))
        assert store.list_all() == []
        store.close()
        assert workspace.branches() == []
    assert [message["role"] for message in sent] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert sent[-2]["content"] == "a is done", "of the process that was killed"
    assert git(real.base, "log", "--format=%s") == "a\nseed\n"
    assert git(real.base, "status", "--porcelain") == f" M {NAME_FROM}\n", "the edit of somebody"
    assert not (real.base / "b").exists()
