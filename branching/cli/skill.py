"""`branching skill`: the instructions for agents that use the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from branching.cli.agent_files import AGENTS, Scope
from branching.cli.error_handling import UsageFault, handle_errors
from branching.cli.options import WorkspaceOption


def skill(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="show | install AGENT",
            help="Print the skill, or write it to where an agent looks for skills: "
            f"{', '.join(AGENTS)}.",
            show_default=False,
        ),
    ],
    scope: Annotated[
        Scope,
        typer.Option(help="The skills of the project, or the user's own for all projects."),
    ] = Scope.project,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would change, and write nothing.")
    ] = False,
    workspace: WorkspaceOption = None,
) -> None:
    """Install the skill that teaches an agent to use this command line.

    A skill is a file that agents read when a task needs it. Agents that have branches as tools
    (branching mcp) do not need it.

    Example: branching skill install claude
    """
    with handle_errors(json=False):
        from branching.cli.agent_files import (
            installed_skill,
            project_around,
            refuse_files_in_container,
            skill_text,
            tell_written,
        )

        if words == ["show"]:
            print(skill_text(), end="")
            return
        if words[0] != "install" or len(words) != 2 or words[1] not in AGENTS:
            raise UsageFault(
                f"write branching skill install AGENT, one of {', '.join(AGENTS)}, or show"
            )
        refuse_files_in_container()
        project: Path = project_around(workspace)
        tell_written(installed_skill(words[1], scope, project, is_dry=dry_run), is_dry=dry_run)
