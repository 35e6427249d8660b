"""Runs Python as an ordinary user, who can reach the interpreter, the package and BranchFS."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import branching
from support.branchfs import find_program

PLACE = Path("/mnt")
PYTHON = f"{PLACE}/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
STRANGER = 54321
"""A user without an entry in /etc/passwd."""
AS_STRANGER = f"setpriv --reuid={STRANGER} --regid={STRANGER} --clear-groups"
IN_NAMESPACE = "unshare --user --map-root-user"


def run_python(
    argv: Sequence[str],
    *,
    how: str = AS_STRANGER,
    fuse_mode: str = "666",
    may_mount: bool = False,
    driver: str = "fuse",
) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter of the tests in an empty directory of the user.

    It runs in a mount namespace of its own, because interpreter and package may be below a home
    directory. /run has the directory of root's sockets.

    Args:
        argv: Arguments of the interpreter.
        how: The command that becomes the user.
        fuse_mode: Permissions of /dev/fuse.
        may_mount: Give the user an entry in /etc/passwd and a setuid fusermount3, as on an ordinary
            system with the package fuse3.
        driver: "overlay": root has mounted the directory, which no user can.
    """
    trees = {
        "python": sys.base_prefix,
        "packages": sysconfig.get_path("purelib"),
        "tree": Path(branching.__file__).parents[1],
    }
    steps = [
        f"mount -t tmpfs -o mode=755 tmpfs {PLACE}",
        *(
            f"mkdir {PLACE}/{name} && mount --bind {shlex.quote(str(tree))} {PLACE}/{name}"
            for name, tree in trees.items()
        ),
        f"cp {shlex.quote(str(find_program()))} {PLACE}/branchfs",
        f"mknod -m {fuse_mode} {PLACE}/fuse c 10 229 && mount --bind {PLACE}/fuse /dev/fuse",
        "mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/branchfs",
        f"mkdir {PLACE}/project && chown {STRANGER}:{STRANGER} {PLACE}/project",
    ]
    if may_mount:
        helper = shutil.which("fusermount3")
        assert helper is not None, "these tests need fusermount3 (the package fuse3)"
        user = f"stranger:x:{STRANGER}:{STRANGER}::{PLACE}/project:/bin/sh"
        steps += [
            f"cp {helper} {PLACE}/fusermount3 && chmod 4755 {PLACE}/fusermount3",
            f"mount --bind {PLACE}/fusermount3 {helper}",
            f"(cat /etc/passwd; echo {user}) > {PLACE}/passwd",
            f"mount --bind {PLACE}/passwd /etc/passwd",
        ]
    variables = {
        "PATH": "/usr/bin:/bin:/usr/sbin",
        "BRANCHFS": PLACE / "branchfs",
        "PYTHONHOME": PLACE / "python",
        "PYTHONPATH": f"{PLACE}/tree:{PLACE}/packages",
    }
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    place = f"{PLACE}/project"
    called = f"env -i {settings} {how} {PYTHON} {shlex.join(argv)}"
    if driver == "overlay":
        program, place = f"{PLACE}/branchfs", f"{PLACE}/view"
        steps.append(f"mkdir {place}")
        steps.append(f"{program} mount --driver overlay --base {PLACE}/project {place}")
        called = f"{{ {called}; code=$?; cd / && {program} unmount {place}; exit $code; }}"
    script = " && ".join([*steps, f"cd {place}", called])
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )
