"""The environment of a function or command in a branch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from branching.process.run_as import Owner
from branching.process.sandbox import OWN_TMP

_CLEAN = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM")
_CLEAN_PREFIX = "LC_"
"""What of ours a clean environment keeps: who, where, and how to talk; no keys and no tokens."""


def inherited_environment(*, is_clean: bool) -> dict[str, str]:
    """Returns our own environment, or the part of it that holds no keys and no tokens."""
    return {
        name: value
        for name, value in os.environ.items()
        if not is_clean or name in _CLEAN or name.startswith(_CLEAN_PREFIX)
    }


def environment_for(
    at: Path,
    owner: Owner | None,
    *,
    added: Mapping[str, str],
    is_clean: bool = False,
    has_own_tmp: bool = True,
) -> dict[str, str]:
    """Returns our own environment, or the clean part of it, with what is told about the branch."""
    environment = inherited_environment(is_clean=is_clean)
    if owner is not None:
        environment.update(owner.environment())
    environment |= {"BRANCHING": "1", "BRANCHING_WORKSPACE": str(at), "PWD": str(at)}
    if has_own_tmp:
        environment["TMPDIR"] = str(OWN_TMP)
    return environment | dict(added)
