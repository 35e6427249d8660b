"""`branching doctor`: what works on this machine, and what to do about what does not.

Each check does the thing rather than ask whether it might work: it opens the device, makes a
control group with the limit, mounts a directory, forks, commits and undoes. What it makes it
removes.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from branching._exit_codes import EXIT_NOTHING_SUCCEEDED
from branching.cli.error_handling import handle_errors
from branching.cli.options import JsonOption
from branching.cli.output import print_json
from branching.cli.signals import defer_signals
from branching.errors import BranchingError

FUSE = Path("/dev/fuse")
FILE_SYSTEMS = Path("/proc/filesystems")
KERNEL_OLDEST = (5, 10)
"""The oldest on which the file system is tested."""

State = Literal["ok", "limited", "missing"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found."""

    name: str
    state: State
    """"limited": what needs it is refused, the rest works. "missing": nothing works without."""
    detail: str
    hint: str = ""


class _Fault(Exception):
    """A check failed; the second argument says what to do."""


def doctor(json: JsonOption = False) -> None:
    """Check what branching needs on this machine. Each line is ok, or says what to do.

    Exit code: 0 all requirements are met, 1 something is missing.

    Example: branching doctor
    """
    with handle_errors(json=json), defer_signals():
        findings = examine()
        is_well = all(finding.state != "missing" for finding in findings)
        if json:
            print_json("doctor", ok=is_well, checks=[vars(finding) for finding in findings])
        else:
            for finding in findings:
                print(f"{finding.state:<8} {finding.name}: {finding.detail}")
                if finding.hint:
                    print(f"         Hint: {finding.hint}")
        raise typer.Exit(0 if is_well else EXIT_NOTHING_SUCCEEDED)


def examine() -> list[Finding]:
    """Returns what all checks find, in the order in which one depends on another."""
    checks: list[tuple[str, State, Callable[[], str]]] = [
        ("Python", "missing", _python),
        ("kernel", "missing", _kernel),
        ("branchfs", "missing", _branchfs),
        ("/dev/fuse", "missing", _fuse),
        ("fusermount3", "missing", _fusermount),
        ("mount", "missing", _mount),
        *(
            (f"limit on {name}", "limited", _limit(name))
            for name in ("memory", "cpu", "pids", "memory_high")
        ),
        ("user namespaces", "limited", _user_namespaces),
        ("DaxFS", "limited", _daxfs),
        ("journal", "limited", _journal),
        ("log", "limited", _log),
    ]
    return [_find(*check) for check in checks]


def _find(name: str, without: State, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, state="ok", detail=check())
    except _Fault as fault:
        detail, hint = fault.args
        return Finding(name=name, state=without, detail=detail, hint=hint)
    except BranchingError as error:
        return Finding(name=name, state=without, detail=error.message, hint=error.hint or "")
    except OSError as error:
        return Finding(name=name, state=without, detail=str(error))


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _kernel() -> str:
    release = platform.release()
    if kernel_version(release) < KERNEL_OLDEST:
        raise _Fault(f"{release} is too old", f"Linux {'.'.join(map(str, KERNEL_OLDEST))} or newer")
    return release


def kernel_version(release: str) -> tuple[int, int]:
    """Reads "6.12.9-amd64", "5.9-rc3" or "6" as major and minor version; 0 for what is missing."""
    found = re.match(r"(\d+)(?:\.(\d+))?", release, re.ASCII)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def _branchfs() -> str:
    from branching._programs import find_branchfs

    return str(find_branchfs())


def _fuse() -> str:
    hint = "sudo modprobe fuse; in a container: docker run --device /dev/fuse"
    try:
        os.close(os.open(FUSE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        raise _Fault("there is none", hint) from None
    except PermissionError as error:
        refused = (
            "give this user read and write access to /dev/fuse (its group, an ACL), or use root"
        )
        raise _Fault(f"it cannot be opened: {error.strerror}", refused) from None
    except OSError as error:
        raise _Fault(f"it cannot be opened: {error.strerror}", hint) from None
    return "can be opened"


def _fusermount() -> str:
    if os.geteuid() == 0:
        return "not needed by root"
    found = shutil.which("fusermount3")
    if found is None:
        raise _Fault("it is not installed; only root can mount", "sudo apt install fuse3")
    return found


def _mount() -> str:
    from branching.fs import Workspace

    with tempfile.TemporaryDirectory(prefix="branching-doctor-") as place:
        base = Path(place, "base")
        base.mkdir()
        with Workspace.mount(base, storage=Path(place, "store")) as workspace:
            with workspace.branch("doctor") as branch:
                (branch.path / "made").write_text("x")
            if not (base / "made").exists():
                raise _Fault("a commit did not reach the directory", "please report this")
            workspace.undo()
            driver = workspace.fstype
            if driver == "branchfs":
                driver += f", not overlay: {workspace.driver_reason}"
    return f"a directory was mounted, branched, committed and undone ({driver})"


def _daxfs() -> str:
    if "\tdaxfs\n" not in FILE_SYSTEMS.read_text():
        return "the module is not loaded: only workspaces on DaxFS need it"
    from branching._linux.mountinfo import read_mounts
    from branching.fs.daxfs import DaxFS

    if os.geteuid() != 0:
        raise _Fault("the module is loaded, and only root can make branches of it", "use root")
    points = [mount.point for mount in read_mounts() if DaxFS.serves(mount)]
    return f"the module is loaded (experimental); mounted: {', '.join(points) or 'nowhere'}"


def _journal() -> str:
    from branching.fs.automount import base_around
    from branching.fs.unmounted_store import is_interrupted

    base = base_around(Path.cwd())
    if is_interrupted(base):
        raise _Fault(
            f"a commit to {base} was interrupted: it may hold old and new files",
            f"branchfs recover {shlex.quote(str(base))}; any other command on it recovers too",
        )
    return f"no commit to {base} is interrupted"


def _log() -> str:
    from branching.fs.automount import base_around
    from branching.fs.unmounted_store import log_of

    base = base_around(Path.cwd())
    log = log_of(base)
    if log is None:
        return f"{base} has no log: nothing is mounted or kept"
    return f"{log}; branchfs log {shlex.quote(str(base))} prints it"


def _limit(name: str) -> Callable[[], str]:
    def check() -> str:
        from branching.process import ResourceLimits
        from branching.process.cgroup import Cgroup

        values = {"memory": 64 << 20, "memory_high": 32 << 20, "cpu": 0.5, "pids": 64}
        limits = ResourceLimits(**{name: values[name]})  # type: ignore[arg-type]
        with Cgroup.create(limits) as scope:
            return f"a control group was made in {scope.path.parent}"

    return check


def _user_namespaces() -> str:
    if os.geteuid() == 0:
        return "not needed by root"
    for path, bad, hint in (
        ("/proc/sys/user/max_user_namespaces", "0", "sudo sysctl user.max_user_namespaces=10000"),
        (
            "/proc/sys/kernel/unprivileged_userns_clone",
            "0",
            "sudo sysctl kernel.unprivileged_userns_clone=1",
        ),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        try:
            value = Path(path).read_text().strip()
        except OSError:
            continue  # this kernel has no such switch
        if value == bad:
            raise _Fault(f"{path} is {value}: ordinary users cannot make them", hint)
    return "allowed"
