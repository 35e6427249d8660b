"""A real BranchFS mount for a test. Without the program or the device it fails, saying which."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from branching import Workspace

REPOSITORY = Path(__file__).parents[3]
MOUNT_SECONDS_MAX = 120


def find_program() -> str:
    """Returns the branchfs program: $BRANCHFS, on PATH, or where cargo puts it."""
    targets = [os.environ.get("CARGO_TARGET_DIR"), str(REPOSITORY / "branchfs" / "target")]
    built = [
        Path(target, profile, "branchfs")
        for target in targets
        if target
        for profile in ("release", "debug")
    ]
    for candidate in (os.environ.get("BRANCHFS"), shutil.which("branchfs"), *map(str, built)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise AssertionError(
        "these tests need the branchfs program: build it (cargo build --manifest-path "
        "branchfs/Cargo.toml) or set BRANCHFS to its path"
    )


@contextmanager
def mounted(base: Path, mountpoint: Path, *options: str, driver: str = "fuse") -> Iterator[Path]:
    """Mounts `base` at `mountpoint` for the length of the `with`."""
    assert Path("/dev/fuse").exists(), "these tests need /dev/fuse (modprobe fuse)"
    program = find_program()
    base.mkdir(exist_ok=True)
    mountpoint.mkdir(exist_ok=True)
    run(program, "mount", "--driver", driver, *options, "--base", str(base), str(mountpoint))
    try:
        yield mountpoint
    finally:
        try:
            run(program, "unmount", str(mountpoint))
        except AssertionError:  # the daemon has died: its mount would be in the way of later tests
            subprocess.run(["umount", "--recursive", "--lazy", str(mountpoint)], check=False)
            subprocess.run([program, "log", str(base)], check=False)
            raise


def run(*argv: str) -> None:
    """Runs a program that has to succeed."""
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=MOUNT_SECONDS_MAX, check=False
    )
    assert done.returncode == 0, f"{' '.join(argv)}: exit {done.returncode}\n{done.stderr}"


def daemon_of(root: Path) -> int:
    with Workspace(root) as space:
        return int(space._backend._control.request("info", {})["pid"])  # type: ignore[attr-defined]


def await_dead(root: Path) -> None:
    """Waits until the kernel has noticed that the daemon was killed."""
    deadline = time.monotonic() + 60
    while os.path.exists(root):  # noqa: PTH110  (Path.exists raises what is awaited)
        assert time.monotonic() < deadline
        time.sleep(0.01)
