"""The checks of `doctor`: the engine, the image, and the report of a container.

`examine` collects the facts from the engine and from one container with the usual flags. The `judge_` functions take
facts and return findings, so that machines that a test does not have are tested as data.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from branching_docker import __version__
from branching_docker.constants import PROBE_WORD, VERSION_LABEL
from branching_docker.engine import Docker
from branching_docker.engine_info import security_options
from branching_docker.errors import WrapperError
from branching_docker.git_links import repository
from branching_docker.plan import probe_argv
from branching_docker.recovery import is_interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from branching_docker.engine import Engine
    from branching_docker.settings import Settings

PROBE_SECONDS_MAX = 120
ROOM_BYTES_LEAST = 1 << 30
API_LEAST = (1, 40)
"""Docker 19.03, the first with `--mount` and `--init` as we use them on every platform."""
# File systems by which virtual machines share directories: commits there cannot exchange files, and locks do not hold.
SHARED_KINDS = ("virtiofs", "9p", "v9fs", "fakeowner", "grpcfuse", "osxfs", "fuseblk", "smb2", "cifs")

UNFIT_KINDS = ("overlay", "fuse.fuse-overlayfs")
"""Whiteouts, by which an overlay marks removed files, cannot be created there."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: "ok", "warning" (something works less well) or "missing" (nothing works)."""

    name: str
    state: str
    detail: str
    hint: str = ""

    def lines(self) -> list[str]:
        """Returns the text for the terminal."""
        told = [f"{self.state:<8} {self.name}: {self.detail}"]
        return [*told, f"         Hint: {self.hint}"] if self.hint else told


def examine(
    settings: Settings, connect: Callable[[], Engine], workspace: Path | None, *, environ: Mapping[str, str]
) -> list[Finding]:
    """Returns the findings in the order of their dependencies; stops at the first that is missing."""
    try:
        engine = connect()
        facts = engine_facts(engine)
        labels = engine.image_labels(settings.image)
    except WrapperError as error:
        detail = f"{error.message} {error.cause or ''}".strip()
        return [Finding(name="engine", state="missing", detail=detail, hint=error.hint)]
    found = [*judge_engine(facts), judge_image(settings.image, labels)]
    if labels is None:
        return found
    if workspace is not None:
        found += judge_journal(workspace, engine)
    return [*found, *probe(settings, engine, workspace, environ=environ)]


def judge_journal(workspace: Path, engine: Engine) -> list[Finding]:
    """Reports a commit that was interrupted: the journal has an entry, and no container works on the directory."""
    if not is_interrupted(workspace):
        return []
    if any(one.workspace == str(workspace) and not one.has_ended for one in engine.containers()):
        return []  # it may be going on
    detail = f"a commit to {workspace} was interrupted: it may hold old and new files"
    hint = "branching-docker -w DIR recover; any command on the directory does it too"
    return [Finding(name="journal", state="warning", detail=detail, hint=hint)]


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Returns what the engine reports about itself."""
    if not isinstance(engine, Docker):
        return {"name": "podman", "command": engine.command}
    with engine.connected() as client:
        version, info = client.version(), client.info()
    return {"name": "docker", "command": engine.command, "at": engine.socket_path, "version": version, "info": info}


def judge_engine(facts: Mapping[str, Any]) -> list[Finding]:
    """Judges an engine by its own report."""
    if facts["name"] != "docker":
        return [Finding(name="engine", state="ok", detail=f"Podman at {facts['command']}")]
    version, info = facts["version"], facts["info"]
    system = str(info.get("OperatingSystem", ""))
    named = f"Docker {version.get('Version')} at {facts['at']}, {system}, kernel {info.get('KernelVersion')}"
    api_version = tuple(int(part) for part in str(version.get("ApiVersion", "0.0")).split("."))
    if api_version < API_LEAST:
        return [Finding(name="engine", state="missing", detail=f"{named} is too old", hint="Docker 19.03 or newer")]
    if info.get("OSType", "linux") != "linux":
        hint = "switch Docker Desktop to Linux containers"
        return [Finding(name="engine", state="missing", detail=f"{named} runs no Linux containers", hint=hint)]
    found = [Finding(name="engine", state="ok", detail=named)]
    security = security_options(info)
    if "rootless" in security or "userns" in security:
        kind = "rootless" if "rootless" in security else "with remapped users"
        detail = f"the engine is {kind}: not tried; /dev/fuse must be open to your user"
        found.append(
            Finding(name="users", state="warning", detail=detail, hint="if mounting fails: chmod 666 /dev/fuse")
        )
    if "selinux" in security:
        detail = "lifted for the container (label=disable), as the directory has no label for it: not tried"
        hint = "if the directory cannot be read, report it; never :z on your own tree, which relabels it"
        found.append(Finding(name="SELinux", state="warning", detail=detail, hint=hint))
    found.append(
        Finding(
            name="AppArmor",
            state="ok",
            detail="lifted for the container, as mounting needs" if "apparmor" in security else "not in use",
        )
    )
    limits = f"control groups version {info.get('CgroupVersion', '1')}"
    found.append(Finding(name="limits", state="ok", detail=limits))
    return found


def judge_image(image: str, labels: Mapping[str, str] | None) -> Finding:
    """Judges whether the image is there and of our version."""
    if labels is None:
        hint = "branching-docker build, or branching-docker --image NAME pull"
        return Finding(name="image", state="missing", detail=f'"{image}" is not on this machine', hint=hint)
    theirs = labels.get(VERSION_LABEL, "none")
    if theirs != __version__:
        return Finding(
            name="image",
            state="warning",
            detail=f'"{image}" has version {theirs}, this is {__version__}',
            hint="branching-docker build",
        )
    return Finding(name="image", state="ok", detail=f'"{image}" {theirs}')


def probe(settings: Settings, engine: Engine, workspace: Path | None, *, environ: Mapping[str, str]) -> list[Finding]:
    """Runs a container with the usual flags, and judges its report."""
    try:
        done = subprocess.run(
            probe_argv(settings, workspace, docker=engine.command, info=engine.info()),
            capture_output=True,
            text=True,
            env=environ,
            timeout=PROBE_SECONDS_MAX,
            check=False,
        )
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        detail = f"it did not end within {PROBE_SECONDS_MAX} s"
        return [Finding(name="container", state="missing", detail=detail, hint="docker ps; docker logs NAME")]
    except ValueError:
        said = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
        hint = f"{engine.info().kind} run --rm {settings.image} {PROBE_WORD}"
        return [Finding(name="container", state="missing", detail=said[0], hint=hint)]
    return judge_container(told, workspace)


def judge_repository(workspace: Path) -> list[Finding]:
    """Warns of a checkout whose repository is elsewhere and is not mounted, as it does not name the directory."""
    try:
        _, _, place = (workspace / ".git").read_text(errors="replace").strip().partition("gitdir: ")
    except OSError:  # no repository, or a whole one
        return []
    found = (workspace / place).resolve()
    if not place or found.is_relative_to(workspace) or repository(workspace):
        return []
    detail = f"its repository is elsewhere ({found}): git does not work in its branches"
    return [Finding(name="git", state="warning", detail=detail, hint="work on the checkout that holds it")]


def judge_container(told: Mapping[str, Any], workspace: Path | None) -> list[Finding]:
    """Judges a container's report about itself and about the directory."""
    states = {"limited": "warning"}
    found = [
        Finding(
            name=f"inside: {check['name']}",
            state=states.get(check["state"], check["state"]),
            detail=check["detail"],
            hint=check.get("hint", ""),
        )
        for check in told["checks"]
    ]
    if workspace is None or not told.get("directory"):
        return found
    found += judge_repository(workspace)
    directory = told["directory"]
    kind, owner = str(directory["kind"]), str(directory["owner"])
    if directory.get("is_read_only"):
        detail = f"{workspace} is on a read-only file system: nothing could be committed"
        found.append(Finding(name="directory", state="missing", detail=detail, hint="mount it writable"))
    elif kind in UNFIT_KINDS:
        detail = f"{workspace} is on {kind}, which cannot store the marks of deleted files that branches need"
        hint = "work on a directory on ext4, XFS, btrfs or tmpfs"
        found.append(Finding(name="directory", state="missing", detail=detail, hint=hint))
    elif any(shared in kind.lower() for shared in SHARED_KINDS):
        detail = f"{workspace} is shared with another system ({kind}): commits may be refused there; not tried"
        hint = "work on a directory inside the machine that runs Docker"
        found.append(Finding(name="directory", state="warning", detail=detail, hint=hint))
    else:
        detail = f"{workspace} ({kind}); commands run as {owner}"
        found.append(Finding(name="directory", state="ok", detail=detail))
    room = int(directory["room"])
    state = "ok" if room >= ROOM_BYTES_LEAST else "warning"
    hint = "" if state == "ok" else "free space: a branch keeps its changed files there until it ends"
    found.append(Finding(name="room", state=state, detail=f"{room / (1 << 30):.1f} GiB", hint=hint))
    return found
