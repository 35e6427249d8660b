"""A warm container: one for a directory, found by its label, in which commands begin at once.

It has the directory mounted and branched once; commands enter it by `docker exec` and share that. It ends when it is
told to, or when it has been idle for long enough: its entry point counts.

Two containers on one directory would be two file systems over one store, and the second is refused, by us with the
name of the first, and by BranchFS's lock if both began at the same moment. So is one above or below another's
directory: each would see, and commit, the other's store.

A container that was made and whose client was killed before it started it stays so for ever, and one that has ended may
stay where the engine was killed with it. Neither works on anything: who comes next waits a while, for it may be in the
middle of its start or of its end, and then removes it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from branching_docker.errors import EngineError, WorkspaceError
from branching_docker.names import READY
from branching_docker.stamp import identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from branching_docker.engine import Engine, Found
    from branching_docker.plan import ContainerPlan

STOP_SECONDS = 60
GONE_SECONDS_MAX = 120.0
BEGIN_SECONDS_MAX = 20.0
"""From when a container is made until it has started: a tenth of a second where nothing else goes on."""
END_SECONDS_MAX = 10.0
"""From when a container has ended until its engine has removed it."""
FREE_SECONDS_MAX = 5.0
"""For a container whose client has gone, a moment ago and perhaps killed: it ends its command, and unmounts."""
POLL_SECONDS = 0.05


def at_work(workspace: Path, engine: Engine, *, environ: Mapping[str, str], say: Callable[[str], None]) -> list[Found]:
    """Returns the containers that have begun and not ended; what is neither, and in our way, is waited for and removed.

    A run's on the same files may be about to end, and is waited for, too. `say` is told of what was removed. Raises
    EngineError where that cannot be.
    """
    began = time.monotonic()
    while True:
        found = engine.containers()
        stuck = [one for one in found if is_in_the_way(one, workspace)]
        waited = time.monotonic() - began
        if not stuck and (waited > FREE_SECONDS_MAX or not is_shared_by_a_run(workspace, found)):
            return [one for one in found if not one.has_ended]
        for one in stuck:
            if is_overdue(one, waited) and remove(one, docker=engine.command, environ=environ):
                what = "was never started" if one.is_unbegun else "has ended"
                say(f"removed the container {one.name}, which {what}: what should have done it was killed.")
            elif waited > GONE_SECONDS_MAX:
                raise not_removed(one)
        time.sleep(POLL_SECONDS)


def is_overdue(one: Found, waited: float) -> bool:
    """Tells whether a start or an end, for which we have waited so many seconds, will not come any more."""
    if one.has_ended:
        return waited > END_SECONDS_MAX
    # What is older than that has been waited for by others. Clocks may be wrong: ours alone decides in the end.
    return max(waited, time.time() - one.made) > BEGIN_SECONDS_MAX


def is_in_the_way(one: Found, workspace: Path) -> bool:
    """Tells whether a container that nothing runs in keeps the workspace from being worked on."""
    if one.is_unbegun:
        return is_shared(workspace, one)
    # Only a warm one's name is asked for again.
    return one.has_ended and one.workspace == str(workspace) and one.warm_settings is not None


def is_shared(workspace: Path, one: Found) -> bool:
    """Tells whether a container has been given files of the workspace."""
    theirs = Path(one.workspace)
    return theirs == workspace or theirs in workspace.parents or workspace in theirs.parents


def is_shared_by_a_run(workspace: Path, found: Sequence[Found]) -> bool:
    """Tells whether some run works on files of the workspace, which has no warm container to work in."""
    shared = [one for one in found if is_shared(workspace, one) and not one.has_ended]
    return any(one.warm_settings is None for one in shared) and not any(
        one.warm_settings is not None and one.workspace == str(workspace) for one in shared
    )


def remove(found: Found, *, docker: str, environ: Mapping[str, str]) -> bool:
    """Removes a container unless something runs in it by now; tells whether it is this that did it."""
    return (
        subprocess.run([docker, "rm", found.identifier], capture_output=True, env=environ, check=False).returncode == 0
    )


def not_removed(found: Found) -> EngineError:
    """Returns the failure of an engine that keeps a container in which nothing runs."""
    return EngineError(f"{found.name} does not run, but is not removed.", hint=f"docker rm --force {found.name}")


def find_warm(workspace: Path, found: Sequence[Found]) -> Found | None:
    """Returns the workspace's warm container, None where nothing works on it.

    Raises WorkspaceError where something else works on it, above it or below it.
    """
    ours = identity(str(workspace))
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
                f"a container works on {workspace} under another name, {theirs} ({one.name}).",
                hint=f"wait for its end, or end it: branching-docker -w {shlex.quote(str(theirs))} down",
            )
        if theirs == workspace:
            raise WorkspaceError(
                f"another container works on {workspace} at this moment ({one.name}).",
                hint="wait for its end; or share one: branching-docker -w DIR up, and every command goes into it",
            )
        if theirs in workspace.parents or workspace in theirs.parents:
            raise WorkspaceError(
                f"a container works on {theirs} ({one.name}), and {workspace} is "
                + ("inside of it." if theirs in workspace.parents else "around it."),
                hint=f"wait for its end, or end it: branching-docker -w {shlex.quote(str(theirs))} down",
            )
    return None


def up(plan: ContainerPlan, *, docker: str, environ: Mapping[str, str]) -> None:
    """Starts a warm container and returns when commands may come.

    Attached until then, so that what keeps it from starting is read where it was asked for.
    Raises EngineError where it ended instead; its reason is on standard error by then.
    """
    with subprocess.Popen(
        plan.argv(),
        executable=docker,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,  # Ctrl-C means us: a container that has come up then is idle, and ends by itself
    ) as client:
        assert client.stdout
        is_ready = any(line == READY for line in client.stdout)
        # The container does not end with the command that showed it to us.
        client.kill()
    if not is_ready:
        raise EngineError(
            f"no warm container was started for {plan.workspace} (the reason is above).", hint="branching-docker doctor"
        )


def up_or_share(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str], say: Callable[[str], None]) -> str:
    """Starts a warm container and returns its name, or that of one that somebody else began at the same moment.

    The engine may also be making one still for a client that was killed, and shows it to nobody until it is made. That
    one goes, and it is tried once more. Raises as `up` and `at_work` do.
    """
    removed: list[str] = []
    try:
        up(plan, docker=engine.command, environ=environ)
    except EngineError:
        found = find_warm(plan.workspace, at_work(plan.workspace, engine, environ=environ, say=removed.append))
        for text in removed:
            say(text)
        if found is not None:
            return found.name
        if not removed:
            raise
        up(plan, docker=engine.command, environ=environ)
    return plan.name


def down(found: Found, *, docker: str, environ: Mapping[str, str]) -> None:
    """Ends a warm container: the commands in it first, then the mount.

    Raises EngineError where the engine cannot.
    """
    if found.is_unbegun or found.has_ended:
        remove(found, docker=docker, environ=environ)
    else:
        stop(found, docker=docker, environ=environ)
    # Its name is free for another when the engine has removed it, a moment later.
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while is_known(found.identifier, docker=docker, environ=environ):
        if time.monotonic() > deadline:
            raise not_removed(found)
        time.sleep(POLL_SECONDS)


def stop(found: Found, *, docker: str, environ: Mapping[str, str]) -> None:
    """Stops a container that runs; raises EngineError where the engine cannot."""
    stopped = subprocess.run(
        [docker, "stop", "-t", str(STOP_SECONDS), found.identifier],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        check=False,
    )
    # One that ended in the meantime, by itself, is what was wanted.
    if stopped.returncode != 0 and "No such container" not in stopped.stderr:
        raise EngineError(f"{found.name} was not stopped.", cause=stopped.stderr.strip(), hint="docker ps shows it")


def is_known(container: str, *, docker: str, environ: Mapping[str, str]) -> bool:
    """Tells whether the engine still knows a container."""
    asked = subprocess.run([docker, "inspect", container], capture_output=True, env=environ, check=False)
    return asked.returncode == 0


def describe(found: Sequence[Found]) -> list[str]:
    """Returns a line for each container: what it is, since when there is a name for it, and where it works."""
    width = max((len(one.name) for one in found), default=0)
    return [
        f"{one.name:<{width}}  {'warm' if one.warm_settings is not None else 'run ':<4}  {one.state:<8}  "
        f"{one.workspace.encode(errors='backslashreplace').decode()}"
        for one in sorted(found, key=lambda one: (one.workspace, one.name))
    ]


def real(directory: Path) -> Path:
    """Returns the real path of a directory that may be gone by now: its container can still be ended."""
    return Path(os.path.realpath(directory))
