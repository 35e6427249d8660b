"""The published package's own tests, version 0.2.0, on our library and live mounts.

They come from its source distribution (scripts/setup fetches it) and are run as they are, in a
process of their own; `published/adapter.py` leads the names they import to our library.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.branchfs import find_program

pytestmark = pytest.mark.slow

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
TESTS = CACHE / "branching-tools" / "published-tests-0.2.0"
SECONDS_MAX = 300

RUN = (
    "test_speculate.py",
    "test_integration.py",
    "test_process_branch.py",
    "test_resource_limits.py::TestResourceLimits",
    "test_resource_limits.py::TestParseMemorySize",
    "test_resource_limits.py::TestExports",
)
"""The rest tests functions inside the package, on mocks: control groups, its argument parser."""
PASSING = 94

DIFFERENT = {
    "test_integration.py::test_workspace_detects_branchfs": (
        'it wants the fstype "fuse.branchfs", which its documentation says is "branchfs" (0.6)'
    ),
    "test_speculate.py::TestSubBranching::test_workspace_from_branch_path": (
        "it opens a path that does not exist; test_workspace.py has the same on one that does"
    ),
    "test_speculate.py::TestSubBranching::test_workspace_at_mount_root_unchanged": (
        "it opens a path that does not exist; test_workspace.py has the same on one that does"
    ),
    "test_process_branch.py::test_close_fds": (
        "it counts open descriptors, and a function in a sandbox has one more of ours"
    ),
    **{
        f"test_speculate.py::{pattern}::test_runs_in_parallel": (
            "it wants an answer within half a second, which a busy machine need not give; "
            "test_speculate.py counts how many run at once"
        )
        for pattern in ("TestBestOfN", "TestTreeOfThoughts", "TestBeamSearch", "TestTournament")
    },
    **{
        f"test_resource_limits.py::TestParseMemorySize::test_{name}_raises": (
            'it wants the words "invalid memory size"; ours is a ValueError in other words'
        )
        for name in ("invalid", "empty", "negative")
    },
}
"""Tests that ask for what ours must not do, or cannot, and why."""


def test_the_published_packages_own_tests_pass() -> None:
    assert TESTS.is_dir(), f"{TESTS} is missing: run scripts/setup"
    here = Path(__file__).parent
    words = [f"--deselect={name}" for name in DIFFERENT]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--timeout=60", "-p", "no:cacheprovider"),
            *("-p", "adapter", *words, *RUN),
        ],
        cwd=TESTS,
        env={
            **os.environ,
            "PYTHONPATH": f"{here}:{here / 'published'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "BRANCHFS": find_program(),
        },
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "skipped" not in done.stdout
    passed = re.search(r"(\d+) passed, (\d+) deselected", done.stdout)
    assert passed, done.stdout[-1000:]
    assert [int(number) for number in passed.groups()] == [PASSING, len(DIFFERENT)]
