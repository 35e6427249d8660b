"""`branching chat`: talk with an agent, and fork the talk."""

from __future__ import annotations

from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import WorkspaceOption
from branching.cli.watch import check_terminal
from branching.cli.workspace import opened_workspace


def chat(
    workspace: WorkspaceOption = None,
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="An agent of pydantic-ai. [default: one with a shell]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PROVIDER:MODEL",
            help="The agent's model. `test` is a demo that needs no key and no network.",
            show_default=False,
        ),
    ] = None,
    judge_model: Annotated[
        str | None,
        typer.Option(
            metavar="PROVIDER:MODEL",
            help="The model that chooses among branches. [default: the agent's model]",
            show_default=False,
        ),
    ] = None,
    test: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Run in each branch before it is judged.", show_default=False
        ),
    ] = None,
) -> None:
    """Chat with an agent that works in the workspace, and fork the conversation into branches.

    Each branch has its own files and budget, and one of them wins. /fork creates branches, Tab
    switches between them, `>>label text` sends a message to one, /merge chooses the winner,
    Escape stops; /help lists the rest. It needs the extras `tui` and `agent`.

    Example: branching chat --model test
    """
    import asyncio

    with handle_errors(json=False):
        check_terminal("chat", "branching fork runs agents without one")
        if agent is None and model is None:
            raise UsageFault("name a model (--model PROVIDER:MODEL) or an agent (--agent)")
        try:
            from branching.tui.chat.pydantic_agent import default_agent, load_agent, open_session
        except ImportError as error:
            raise UsageFault(str(error)) from error
        from branching.tui.chat.app import Chat

        talker = default_agent(None) if agent is None else load_agent(agent)
        with opened_workspace(workspace) as space:

            async def talk() -> int:
                session = await open_session(
                    space, talker, model=model, judge_model=judge_model, test_command=test
                )
                app = Chat(session)
                await app.run_async()
                return app.return_code or 0

            code = asyncio.run(talk())
        raise typer.Exit(code)
