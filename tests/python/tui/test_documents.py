"""The code in the documents of `watch` and `chat`, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Mounted

DOCUMENTS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS_MAX = 100


def _blocks() -> list[tuple[str, str]]:
    return [
        (match[1], match[2])
        for name in ("watch", "chat")
        if (DOCUMENTS / f"{name}.md").exists()
        for match in BLOCK.finditer((DOCUMENTS / f"{name}.md").read_text())
    ]


@pytest.mark.parametrize(("kind", "text"), _blocks(), ids=lambda value: value.split("\n")[0][:40])
def test_every_block_runs(real: Mounted, tmp_path: Path, kind: str, text: str) -> None:
    program = tmp_path / "branching"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m branching "$@"\n')
    program.chmod(0o755)
    interpreter = {"sh": ["bash", "-eu"], "python": [sys.executable]}[kind]
    done = subprocess.run(
        [*interpreter, "-c", text.replace("/workspace", str(real.root))],
        cwd=real.root,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
