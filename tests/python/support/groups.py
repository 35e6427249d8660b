"""Programs in control groups, and what is left of the groups."""

from __future__ import annotations

import os
import subprocess
import sys

from branching.process.cgroup import Cgroup
from branching.process.cgroup.cgroup_dir import NAME_PREFIX
from branching.process.cgroup.own_cgroup import UNIFIED, find_own
from branching.process.cgroup.v2 import LEAF

MIB = 1 << 20
END_SECONDS_MAX = 60


def version() -> int:
    """Returns the control group version of this machine's memory controller."""
    return 1 if "memory" in find_own() else 2


def start(scope: Cgroup, code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts Python code in the scope; it runs once it is in there. `sys` is imported."""
    words = [sys.executable, "-c", f"import sys; sys.stdin.readline()\n{code}"]
    child = subprocess.Popen(
        [*words, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    scope.add(child.pid)
    assert child.stdin
    child.stdin.write("\n")
    child.stdin.flush()
    return child


def run(scope: Cgroup, code: str, *arguments: object) -> tuple[int, str]:
    """Does the same, waits for its end, and returns exit code and output."""
    child = start(scope, code, *arguments)
    output, _ = child.communicate(timeout=END_SECONDS_MAX)
    return child.returncode, output


def groups() -> frozenset[str]:
    """Returns the control groups that this process made below its own group. Groups of other
    processes are not included: concurrent runs share the parent group.
    """
    found = set()
    for controller, own in find_own().items():
        place = own.path.parent if controller == UNIFIED and own.path.name == LEAF else own.path
        found |= {str(path) for path in place.glob(f"{NAME_PREFIX}{os.getpid()}-*")}
    return frozenset(found)
