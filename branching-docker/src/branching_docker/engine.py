"""The engine: what is on it, and the deeds that are its command's.

Two of them are known. Docker answers questions over its socket, which takes milliseconds; Podman has no daemon, so its
command is asked. An attached run is handed to the command: this process *becomes* it, so that terminals, signals, job
control, contexts and exit codes are its own and nothing has to imitate them.

What the command does not do: when it is killed outright, the container lives on. A watcher, a shell waiting on a pipe
whose other end the command holds without knowing, sees the pipe close whatever closed it, and stops the container, also
one that the engine is only just making. After an ordinary end there is nothing left to stop.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from branching_docker import api
from branching_docker.endpoint import endpoint
from branching_docker.entry import IGNORED_BY_PYTHON, PASSED_ON, exit_code
from branching_docker.errors import EngineError, ImageError
from branching_docker.facts import EngineFacts, docker_facts, podman_facts
from branching_docker.names import DIRECTORY_LABEL, JOURNAL, NAME_LABEL, STAGE_LABEL, WARM_LABEL, WORKSPACE_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from branching_docker.plan import ContainerPlan

# One stop for a running container (its entry point ends the command and unmounts), one removal for a created one.
# One that the engine does not know has ended and is gone, and its events tell of it; or the client died before it was
# made. Then the engine may be making it still: it shows it to nobody, but its name is taken from the beginning. So we
# make one of that name ourselves: when we may, there is and will be no other. Not with Podman, which makes a container
# itself, and is dead by then.
# Then, if the container has left an entry in the directory's journal, it was killed in the middle of a commit: another
# one recovers, and a line on the user's standard error says so, which this process has kept for that alone. It is tried
# for half a minute: the engine may be just starting again.
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
        [ "$said" = "nothing to recover" ] || echo "branching-docker: the container was killed in a commit: $said." >&2
        exit
    }
    sleep 2
done
is_interrupted || exit 0
echo "branching-docker: the container was killed in a commit, which was not recovered: $said" >&2
echo "Hint: the next command on the directory recovers, or: branching-docker -w DIR recover" >&2
"""
SELINUX = Path("/sys/fs/selinux/enforce")
UNBEGUN_STATES = ("created", "configured", "initialized")
ENDED_STATES = ("exited", "stopped", "dead", "removing")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A container that works on a directory."""

    identifier: str
    name: str
    workspace: str
    state: str
    warm_settings: str | None
    """Of a warm one, the settings it was made with."""
    directory: str = ""
    """What tells it from another of that name; empty if whoever made the container did not say."""
    made: float = 0.0
    """When, by the clock of the machine that has the engine."""

    @property
    def is_unbegun(self) -> bool:
        """Whether it was made and never started; an ordinary start takes a moment from one to the other."""
        return self.state in UNBEGUN_STATES

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs in it any more: it is about to be removed."""
        return self.state in ENDED_STATES


class Engine(Protocol):
    """What we ask of an engine. All raise EngineError where it does not answer."""

    command: str
    """The path of its command."""
    socket_path: str | None
    """Where it answers; None where its command must be asked."""

    def facts(self) -> EngineFacts:
        """Returns what a plan must know."""

    def containers(self) -> list[Found]:
        """Lists the containers, of any directory, those too that have ended and are about to be removed."""

    def image_labels(self, image: str) -> dict[str, str] | None:
        """Returns an image's labels, None where the engine has no such image."""

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        """Returns a volume's labels, None where the engine has no such volume."""

    def drop_superseded(self, image: str) -> None:
        """Removes what earlier builds of that name left without it, but for the newest stage: the builder's cache.

        What others built, and whatever else lies about on the machine, stays.
        """


def connect(name: str | None, *, environ: Mapping[str, str]) -> Engine:
    """Returns the engine of that name; without one Docker, or Podman where there is only that.

    Raises EngineError where it is not installed, or on another machine.
    """
    path = environ.get("PATH")
    for candidate in (name,) if name else ("docker", "podman"):
        if command := shutil.which(candidate, path=path):
            # Debian's podman-docker is a script called docker.
            is_podman = candidate == "podman" or os.path.basename(os.path.realpath(command)) == "podman"  # noqa: PTH119
            return Podman(command, environ) if is_podman else Docker(command, endpoint(environ))
    raise EngineError(
        f"the {name or 'docker'} command is not installed.",
        cause=f"there is no {name or 'docker'} on PATH",
        hint="install Docker (Debian, Ubuntu: sudo apt-get install docker.io; elsewhere: Docker Desktop)",
    )


class Docker:
    """Docker, asked over its socket."""

    def __init__(self, command: str, socket_path: str) -> None:
        self.command = command
        self.socket_path: str | None = socket_path
        self.at = socket_path

    def facts(self) -> EngineFacts:
        """Asks for them; some milliseconds."""
        info = cast("dict[str, Any]", api.get("/info", at=self.at))
        return docker_facts(info, platform=sys.platform)

    def containers(self) -> list[Found]:
        """Lists the containers."""
        filters = api.quoted(json.dumps({"label": [WORKSPACE_LABEL]}))
        listed = api.get(f"/containers/json?all=1&filters={filters}", at=self.at)
        return [
            Found(
                identifier=one["Id"],
                name=one["Names"][0].lstrip("/"),
                workspace=one["Labels"][WORKSPACE_LABEL],
                state=one["State"],
                warm_settings=one["Labels"].get(WARM_LABEL),
                directory=one["Labels"].get(DIRECTORY_LABEL, ""),
                made=one["Created"],
            )
            for one in cast("list[dict[str, Any]]", listed)
            if one["Names"]
        ]

    def image_labels(self, image: str) -> dict[str, str] | None:
        """Returns an image's labels."""
        try:
            found = api.get(f"/images/{api.quoted(image)}/json", at=self.at)
        except api.RefusedError as refused:
            if refused.status == api.NOT_FOUND:
                return None
            raise EngineError(
                f'Docker could not look up the image "{image}".',
                cause=refused.message,
                hint="docker image ls shows the names there are",
            ) from refused
        return cast("dict[str, dict[str, dict[str, str]]]", found)["Config"].get("Labels") or {}

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        """Returns a volume's labels."""
        try:
            found = api.get(f"/volumes/{api.quoted(volume)}", at=self.at)
        except api.RefusedError:
            return None
        return cast("dict[str, dict[str, str] | None]", found).get("Labels") or {}

    def drop_superseded(self, image: str) -> None:
        """Removes unnamed images and stages, the classic builder's, by the label of what they were built for."""
        for stage, kept in (("image", 0), ("build", 1)):
            labels = [f"{STAGE_LABEL}={stage}", f"{NAME_LABEL}={image}"]
            filters = api.quoted(json.dumps({"dangling": ["true"], "label": labels}))
            listed = cast("list[dict[str, int]]", api.get(f"/images/json?filters={filters}", at=self.at))
            listed.sort(key=lambda one: one["Created"])
            for one in listed[: len(listed) - kept]:
                with suppress(api.RefusedError):  # a container still runs from it; a later build finds it again
                    api.request(
                        "DELETE",
                        f"/images/{one['Id']}",
                        at=self.at,
                        timeout_seconds=api.REMOVAL_TIMEOUT_SECONDS,
                    )


class Podman:
    """Podman, asked through its command."""

    def __init__(self, command: str, environ: Mapping[str, str]) -> None:
        self.command = command
        self.socket_path: str | None = None
        self.environ = environ
        if host := environ.get("CONTAINER_HOST"):
            raise EngineError(
                f"Podman is told to work on another machine ({host}), where the directory does not exist.",
                hint="unset CONTAINER_HOST, or run branching-docker on that machine",
            )

    def facts(self) -> EngineFacts:
        """Looks for them itself: podman takes a tenth of a second to tell."""
        return podman_facts(platform=sys.platform, has_selinux=SELINUX.exists())

    def containers(self) -> list[Found]:
        """Lists the containers."""
        listed = self.ask("ps", "--all", "--filter", f"label={WORKSPACE_LABEL}", "--format", "json")
        return [
            Found(
                identifier=one["Id"],
                name=one["Names"][0],
                workspace=one["Labels"][WORKSPACE_LABEL],
                state=one["State"],
                warm_settings=one["Labels"].get(WARM_LABEL),
                directory=one["Labels"].get(DIRECTORY_LABEL, ""),
                made=one["Created"],
            )
            for one in json.loads(listed.stdout or "[]")
        ]

    def image_labels(self, image: str) -> dict[str, str] | None:
        """Returns an image's labels."""
        if self.ask("image", "exists", image, allowed=(0, 1)).returncode == 1:
            return None
        return json.loads(self.ask("image", "inspect", image).stdout)[0].get("Labels") or {}

    def volume_labels(self, volume: str) -> dict[str, str] | None:
        """Returns a volume's labels."""
        found = self.ask("volume", "inspect", volume, allowed=(0, 1, 125))
        return None if found.returncode else json.loads(found.stdout)[0].get("Labels") or {}

    def drop_superseded(self, image: str) -> None:
        """Leaves that to Podman: its builder keeps stages as a cache of its own."""

    def ask(self, *arguments: str, allowed: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        """Runs podman and returns what it says."""
        done = subprocess.run([self.command, *arguments], capture_output=True, text=True, env=self.environ, check=False)
        if done.returncode not in allowed:
            raise EngineError(
                f"podman {arguments[0]} failed.", cause=done.stderr.strip() or None, hint="podman info says more"
            )
        return done


def become(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> NoReturn:
    """Becomes the plan's command, with a watcher."""
    os.set_inheritable(watch_plan(plan, engine, environ=environ), True)
    os.execve(engine.command, plan.argv(), environ)


def run(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> int:
    """Runs the plan's command, with a watcher, and returns its exit code; our signals are passed on to it.

    For a command after which something is left to do. It reads no terminal, and has a process group of its own, so that
    a key at the terminal does not reach it twice.
    """
    watch_plan(plan, engine, environ=environ)
    early: list[int] = []
    running = 0

    def pass_on(number: int, _frame: object = None) -> None:
        if running:
            with suppress(ProcessLookupError):
                os.kill(running, number)
        else:
            early.append(number)

    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    running = os.posix_spawn(engine.command, plan.argv(), environ, setsigdef=IGNORED_BY_PYTHON, setpgroup=0)
    for number in early:
        pass_on(number)
    return exit_code(os.waitpid(running, 0)[1])


def watch_plan(plan: ContainerPlan, engine: Engine, *, environ: Mapping[str, str]) -> int:
    """Starts the watcher of a plan's container, and returns the descriptor whose end it waits for."""
    from branching_docker.recovery import plan_recovery

    made_by_daemon = plan.image if engine.socket_path else ""
    recovery = plan_recovery(plan.workspace, settings=plan.settings, facts=plan.facts)
    return watch(plan.name, image=made_by_daemon, command=engine.command, environ=environ, recovery=recovery)


def build_context(source: Path | None) -> Path:
    """Returns where to build from: the tree that was named, that we stand in, or that came with the wheel."""
    here, packaged = Path.cwd(), Path(__file__).parent / "context"
    if source is not None:
        return source.absolute()
    return here if (here / "branchfs" / "Cargo.toml").is_file() or not packaged.is_dir() else packaged


def build(engine: Engine, source: Path, image: str, *, environ: Mapping[str, str]) -> None:
    """Builds the image from a source tree, on the base that the tree's own script finds or makes.

    Raises EngineError or ImageError; an image of that name that was there before stays.
    """
    if not (source / "Dockerfile").is_file():
        raise ImageError(
            f"{source} holds no Dockerfile.",
            hint="give the source tree: branching-docker build DIR",
        )
    base = subprocess.run(
        [source / "scripts" / "base-image"],
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "CONTAINER_ENGINE": engine.command},
        check=False,
    )
    if base.returncode != 0:
        raise ImageError(
            "there is no base image to build on (its reason is above).",
            hint="follow the hint above",
        )
    command = [
        engine.command,
        "build",
        "--tag",
        image,
        "--build-arg",
        f"BASE_IMAGE={base.stdout.strip()}",
        "--build-arg",
        f"BRANCHING_NAME={image}",
        str(source),
    ]
    if (code := subprocess.run(command, env=environ, check=False).returncode) != 0:
        raise ImageError(
            f'the image "{image}" was not built: docker build ended with {code} (its reason is above).',
            hint="nothing was replaced; mend the reason and build again",
        )
    engine.drop_superseded(image)


def pull(engine: Engine, image: str, *, environ: Mapping[str, str]) -> None:
    """Pulls the image; raises ImageError where that fails, with what was there before still there."""
    if subprocess.run([engine.command, "pull", image], env=environ, check=False).returncode != 0:
        raise ImageError(
            f'the image "{image}" could not be pulled (the reason is above).',
            hint="branching-docker build makes it here; --image names another",
        )


def watch(
    name: str,
    *,
    image: str,
    command: str,
    environ: Mapping[str, str],
    recovery: ContainerPlan | None = None,
) -> int:
    """Starts the watcher of the container `name`, and returns its pipe, which closes when this process ends.

    `image` is whose container it is, if a daemon makes it. `recovery` runs if the container was killed in a commit.
    """
    journal = str(recovery.workspace / JOURNAL) if recovery else ""
    again = [command, *recovery.argv()[1:]] if recovery else []
    reading, writing = os.pipe()
    # A session of its own: what kills this process's group or closes its terminal must not reach it.
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
