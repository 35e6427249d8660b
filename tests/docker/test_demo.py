"""The README's first command, as it stands there, in a directory of its own."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from conftest import ROOT

if TYPE_CHECKING:
    from pathlib import Path

DEMO_SECONDS_MAX = 550


def test_the_demo_shows_that_all_holds(image: str, tmp_path: Path) -> None:
    """The demo checks its own results; its exit code is not 0 if one check fails."""
    assert "scripts/demo " in (ROOT / "README.md").read_text()
    done = subprocess.run(
        [ROOT / "scripts" / "demo"],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "BRANCHING_IMAGE": image},
        capture_output=True,
        text=True,
        timeout=DEMO_SECONDS_MAX,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "checks hold" in done.stdout
    assert "FAILS" not in done.stdout
