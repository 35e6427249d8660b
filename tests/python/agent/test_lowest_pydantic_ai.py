"""The oldest pydantic-ai that the extra allows does what the newest does.

Goal: what changed its shape between the versions is handled. Method: the tests of live forks and of
runs, in a process of their own, with the old package in front of the new one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.branchfs import find_program

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
LOWEST = "2.54.0"
PLACE = CACHE / "branching-tools" / f"pydantic-ai-{LOWEST}"
SECONDS_MAX = 1500


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 20)
def test_the_lowest_version_passes_the_tests_of_the_newest(scratch: Path) -> None:
    assert PLACE.is_dir(), "scripts/setup installs it"
    here = Path(__file__).parent
    script = "import sys, pytest; from importlib.metadata import version; "
    script += "print('version', version('pydantic-ai-slim')); sys.exit(pytest.main(sys.argv[1:]))"
    own = Path(tempfile.mkdtemp(prefix="l", dir=scratch))  # short: sockets will lie in it
    done = subprocess.run(
        [
            *(sys.executable, "-c", script, "-q", "-p", "no:cacheprovider"),
            *("-k", "not fifty", str(here / "test_live_fork.py"), str(here / "test_runs.py")),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(PLACE),
            "BRANCHFS": find_program(),
            "TMPDIR": str(own),
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    shutil.rmtree(own)
    assert f"version {LOWEST}" in done.stdout, done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) > 40


def test_the_lowest_version_is_the_one_of_the_extra() -> None:
    (needed,) = [
        Requirement(line)
        for line in metadata.requires("branching-workspaces") or []
        if line.startswith("pydantic-ai-slim") and "extra == 'agent'" in line.replace('"', "'")
    ]
    assert LOWEST in needed.specifier
    assert "2.53.9" not in needed.specifier
    assert metadata.version("pydantic-ai-slim") in needed.specifier
