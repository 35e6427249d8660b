"""The environment of a function or command in a branch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from branching.process.owner import Owner
from branching.process.sandbox import OWN_TMP

_CLEAN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM")
_CLEAN_PREFIX = "LC_"
"""What of ours a clean environment keeps: who, where, and how to talk; no keys and no tokens."""


def environment_for(
    at: Path,
    owner: Owner | None,
    *,
    added: Mapping[str, str],
    is_clean: bool = False,
    has_own_tmp: bool = True,
) -> dict[str, str]:
    """Returns our own environment, or the clean part of it, with what is told about the branch."""
    environment = dict(os.environ)
    if is_clean:
        environment = {
            name: value
            for name, value in environment.items()
            if name in _CLEAN or name.startswith(_CLEAN_PREFIX)
        }
    if owner is not None:
        environment.update(owner.environment())
    environment |= {"BRANCHING": "1", "BRANCHING_WORKSPACE": str(at), "PWD": str(at)}
    if has_own_tmp:
        environment["TMPDIR"] = str(OWN_TMP)
    return environment | dict(added)
