"""A warm container: one for a directory, found by its label, in which commands start without a container's start.

The directory is mounted and branched in it once, and commands enter it by `docker exec`. It ends by `down`, or after an
idle time that its entry point measures.

Two containers on one directory would be two file systems over one store. The second is refused: here, with the name of
the first, or by BranchFS's lock if both started at the same moment. A container above or below another's directory is
refused too, because each would see, and commit, the other's store.

A container whose client was killed between creating and starting it is never started. One that has ended may remain if
the engine was killed at that moment. Neither works on anything. The next command waits, because the container may be
in the middle of its start or end, and then removes it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from branching_docker.constants import READY
from branching_docker.errors import EngineError, WorkspaceError
from branching_docker.fingerprint import directory_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from branching_docker.engine import Engine, WorkspaceContainer
    from branching_docker.plan import ContainerPlan

GONE_SECONDS_MAX = 120.0
BEGIN_SECONDS_MAX = 20.0
"""From a container's creation to its start, which takes a tenth of a second on an idle machine."""
END_SECONDS_MAX = 10.0
"""From a container's end to its removal by the engine."""
FREE_SECONDS_MAX = 5.0
"""For a container whose client has just ended or been killed: it ends its command and unmounts."""
POLL_SECONDS = 0.05


def active_containers(workspace: Path, engine: Engine, *, say: Callable[[str], None]) -> list[WorkspaceContainer]:
    """Returns the containers that have started and not ended.

    First it waits for those that keep the workspace from being used and are in neither state, and removes them if that
    takes too long. It also waits a little for a run on the same files that may be about to end.

    Args:
        workspace: The directory to be used.
        engine: The engine with the containers.
        say: Called with a sentence for each removed container.

    Raises:
        EngineError: a container cannot be removed.
    """
    began = time.monotonic()
    while True:
        found = engine.containers()
        stuck = [one for one in found if is_in_the_way(one, workspace)]
        waited = time.monotonic() - began
        if not stuck and (waited > FREE_SECONDS_MAX or not is_shared_by_a_run(workspace, found)):
            return [one for one in found if not one.has_ended]
        for one in stuck:
            if is_overdue(one, waited) and engine.remove(one.identifier):
                what = "was never started" if one.is_created else "has ended"
                say(
                    f"removed the container {one.name}, which {what}: the process that should have removed it was "
                    "killed."
                )
            elif waited > GONE_SECONDS_MAX:
                raise not_removed(one)
        time.sleep(POLL_SECONDS)


def is_overdue(one: WorkspaceContainer, waited: float) -> bool:
    """Returns whether a start or an end, for which we have waited so many seconds, is no longer to be expected."""
    if one.has_ended:
        return waited > END_SECONDS_MAX
    # An old container need not be waited for. The engine's clock may be wrong; then our own waiting decides.
    return max(waited, time.time() - one.created) > BEGIN_SECONDS_MAX


def is_in_the_way(one: WorkspaceContainer, workspace: Path) -> bool:
    """Returns whether a container without a running process keeps the workspace from being used."""
    if one.is_created:
        return is_shared(workspace, one)
    # Only a warm container's name is used again.
    return one.has_ended and one.workspace == str(workspace) and one.warm_settings is not None


def is_shared(workspace: Path, one: WorkspaceContainer) -> bool:
    """Returns whether a container shares files with the workspace."""
    theirs = Path(one.workspace)
    return theirs == workspace or theirs in workspace.parents or workspace in theirs.parents


def is_shared_by_a_run(workspace: Path, found: Sequence[WorkspaceContainer]) -> bool:
    """Returns whether a run works on files of the workspace, which has no warm container of its own."""
    shared = [one for one in found if is_shared(workspace, one) and not one.has_ended]
    return any(one.warm_settings is None for one in shared) and not any(
        one.warm_settings is not None and one.workspace == str(workspace) for one in shared
    )


def not_removed(found: WorkspaceContainer) -> EngineError:
    """Returns the failure of an engine that does not remove an ended container."""
    return EngineError(f"{found.name} has stopped, but was not removed.", hint=f"docker rm --force {found.name}")


def find_warm(workspace: Path, found: Sequence[WorkspaceContainer]) -> WorkspaceContainer | None:
    """Returns the workspace's warm container, None if no container works on it.

    Raises:
        WorkspaceError: another container works on it, above it or below it.
    """
    ours = directory_identity(str(workspace))
    for one in found:
        if one.workspace == str(workspace) and one.warm_settings is not None:
            if one.directory and one.directory != ours:
                raise WorkspaceError(
                    f"{one.name} works on the directory that was {workspace} before it was moved or removed.",
                    hint="end it, and start another: branching-docker -w DIR down",
                )
            return one
    for one in found:
        theirs = Path(one.workspace)
        if one.directory and one.directory == ours and theirs != workspace:
            raise WorkspaceError(
                f"a container uses {workspace} under another path, {theirs} ({one.name}).",
                hint=f"wait until it ends, or end it: branching-docker -w {shlex.quote(str(theirs))} down",
            )
        if theirs == workspace:
            raise WorkspaceError(
                f"another container is using {workspace} ({one.name}).",
                hint="wait until it ends; or share one: branching-docker -w DIR up, and every command goes into it",
            )
        if theirs in workspace.parents or workspace in theirs.parents:
            raise WorkspaceError(
                f"a container works on {theirs} ({one.name}), and {workspace} is "
                + ("inside of it." if theirs in workspace.parents else "around it."),
                hint=f"wait until it ends, or end it: branching-docker -w {shlex.quote(str(theirs))} down",
            )
    return None


def up(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> None:
    """Starts a warm container and returns when it is ready for commands.

    The docker command stays attached until then, so that the user reads the reason of a failure.

    Raises:
        EngineError: the container ended instead; the reason is on standard error.
    """
    with subprocess.Popen(
        plan.argv(),
        executable=engine.command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,  # Ctrl-C must reach only us: a container that has started is idle, and ends by itself
    ) as client:
        assert client.stdout
        is_ready = any(line == READY for line in client.stdout)
        # The container does not end with the docker command.
        client.kill()
    if not is_ready:
        raise EngineError(
            f"no warm container was started for {plan.workspace} (the reason is above).", hint="branching-docker doctor"
        )


def up_or_share(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Starts a warm container and returns its name, or that of one that another command started at the same moment.

    The engine may still be creating one for a client that was killed, and does not list it until then. That one is
    removed, and the start tried once more.

    Raises:
        EngineError: as `up` and `active_containers` do.
    """
    removed: list[str] = []
    try:
        up(plan, engine, environ=environ)
    except EngineError:
        found = find_warm(plan.workspace, active_containers(plan.workspace, engine, say=removed.append))
        for text in removed:
            say(text)
        if found is not None:
            return found.name
        if not removed:
            raise
        up(plan, engine, environ=environ)
    return plan.name


def down(container: WorkspaceContainer, engine: Engine) -> None:
    """Ends a warm container: the commands in it first, then the mount.

    Raises:
        EngineError: the engine does not answer, or keeps the container.
    """
    if container.is_created or container.has_ended:
        engine.remove(container.identifier)
    else:
        engine.stop(container.identifier)
    # The engine removes it, and releases its name, a moment after its end.
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while engine.is_known(container.identifier):
        if time.monotonic() > deadline:
            raise not_removed(container)
        time.sleep(POLL_SECONDS)


def describe(found: Sequence[WorkspaceContainer]) -> list[str]:
    """Returns a line for each container: name, kind, state and directory."""
    width = max((len(one.name) for one in found), default=0)
    return [
        f"{one.name:<{width}}  {'warm' if one.warm_settings is not None else 'run ':<4}  {one.state:<8}  "
        f"{one.workspace.encode(errors='backslashreplace').decode()}"
        for one in sorted(found, key=lambda one: (one.workspace, one.name))
    ]


def realpath(directory: Path) -> Path:
    """Returns the real path of a directory, which may be missing: its container can still be ended."""
    return Path(os.path.realpath(directory))
