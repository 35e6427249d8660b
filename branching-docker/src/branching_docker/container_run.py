"""An attached run: the plan's `docker run`, and the watcher that ends its container when this process is killed.

This process becomes the docker command, so that terminals, signals, job control and exit codes are the command's own.
When the docker command is killed, its container keeps running. So a watcher, a shell that waits on a pipe which only
this process holds open, stops the container after whatever closed the pipe, also if the engine is still creating it.
After an ordinary end nothing is left to stop.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from branching_docker.constants import JOURNAL
from branching_docker.recovery import plan_recovery
from branching_docker.warm_exec import FORWARDED_SIGNALS, IGNORED_BY_PYTHON, exit_code

if TYPE_CHECKING:
    from collections.abc import Mapping

    from branching_docker.engine import Engine
    from branching_docker.plan import ContainerPlan

# A running container is stopped (its entry point ends the command and unmounts), and a created one removed.
# If the engine does not know the container, it has ended and the engine's events list it, or the client was killed
# before it was created. Then the engine may still be creating it: it is not listed yet, but its name is reserved from
# the beginning. So the watcher creates a container of that name itself: if it can, there is and will be no other. Not
# with Podman, whose command creates the container itself and has ended.
# If the container has then left an entry in the directory's journal, it was killed in the middle of a commit. Another
# container recovers, and a line on the user's standard error, which the watcher keeps open for that, reports it. This
# is tried for half a minute, because the engine may be restarting.
WATCHER = """
journal=$4
is_interrupted() { set -- "$journal"/[!.]*; [ -n "$journal" ] && [ -e "$1" ]; }
read -r _
is_interrupted || exec 2>/dev/null
{
"$1" stop -t 60 "$0" || [ -z "$2" ] ||
    [ -n "$("$1" events --since "$3" --until "$(($(date +%s) + 1))" --filter "container=$0")" ] ||
    for _ in $(seq 600); do
        said=$("$1" create --pull never --name "$0" "$2" 2>&1) && break
        case $said in *"already in use"*) "$1" rm --force "$0" ;; *) break ;; esac
        sleep 0.1
    done
"$1" rm --force "$0"
} >/dev/null 2>&1
shift 4
for _ in $(seq 15); do
    is_interrupted || exit 0
    said=$("$@" 2>&1 </dev/null) && {
        [ "$said" = "nothing to recover" ] ||
            echo "branching-docker: the container was killed during a commit: $said." >&2
        exit
    }
    sleep 2
done
is_interrupted || exit 0
echo "branching-docker: the container was killed during a commit, which was not recovered: $said" >&2
echo "Hint: the next command on the directory recovers, or: branching-docker -w DIR recover" >&2
"""


def exec_docker(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> NoReturn:
    """Becomes the plan's command, with a watcher."""
    os.set_inheritable(watch_plan(plan, engine, environ=environ), True)
    os.execve(engine.command, plan.argv(), environ)


def run(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> int:
    """Runs the plan's command, with a watcher, and returns its exit code; forwards our signals to it.

    For a command that is followed by further work of ours. On a terminal it stays in our group, because it reads the
    terminal, where Ctrl-C is a byte. Otherwise it has its own, so that the terminal's signals do not reach it twice.
    """
    watch_plan(plan, engine, environ=environ)
    early: list[int] = []
    running = 0

    def forward(number: int, _frame: object = None) -> None:
        if running:
            with suppress(ProcessLookupError):
                os.kill(running, number)
        else:
            early.append(number)

    for number in FORWARDED_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    group = os.getpgrp() if plan.tty else 0
    running = os.posix_spawn(engine.command, plan.argv(), environ, setsigdef=IGNORED_BY_PYTHON, setpgroup=group)
    for number in early:
        forward(number)
    return exit_code(os.waitpid(running, 0)[1])


def watch_plan(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> int:
    """Starts the watcher of a plan's container, and returns the pipe whose end it waits for."""
    image = plan.image if engine.socket_path else ""
    recovery = plan_recovery(plan.workspace, settings=plan.settings, info=plan.info)
    return watch(plan.name, image=image, command=engine.command, environ=environ, recovery=recovery)


def watch(
    name: str,
    *,
    image: str,
    command: str,
    environ: Mapping[str, str],
    recovery: ContainerPlan | None = None,
) -> int:
    """Starts the watcher of the container `name`, and returns its pipe, which closes when this process ends.

    `image` is the container's image if a daemon creates the container. `recovery` runs if it was killed in a commit.
    """
    journal = str(recovery.workspace / JOURNAL) if recovery else ""
    again = [command, *recovery.argv()[1:]] if recovery else []
    reading, writing = os.pipe()
    # A session of its own: a signal to this process's group or the end of its terminal must not reach it.
    subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, name, command, image, str(int(time.time())), journal, *again],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=None if recovery else subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
        env=environ,
    )
    os.close(reading)
    return writing
