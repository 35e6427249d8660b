"""The token that clients of `branching mcp --http` must have, as its caller gives it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

TOKEN_VARIABLE = "BRANCHING_MCP_TOKEN"
TOKEN_CHARACTERS_MIN = 16


def read_token(file: Path | None) -> str | None:
    """Returns the token of the file, or of the environment, from which it is taken: commands in
    branches must not find it there. ValueError for one that protects nothing.
    """
    told = os.environ.pop(TOKEN_VARIABLE, None)
    if file is not None:
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise ValueError(f"others may read {file}, which has the token: chmod 600 it")
        told = file.read_text(encoding="utf-8").strip()
    if told is not None and len(told) < TOKEN_CHARACTERS_MIN:
        raise ValueError(f"the token has less than {TOKEN_CHARACTERS_MIN} characters")
    return told
