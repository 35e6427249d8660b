"""How forks are made: what the `/fork-…` commands settle, remembered from one chat to the next.

    ~/.config/branching/chat.json      or below $XDG_CONFIG_HOME

A file that cannot be read is as good as none, and says so; it is replaced when something is
settled.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from branching.agent.types import MergeKind

KINDS: tuple[MergeKind, ...] = ("manual", "auto", "auto_with_fallback", "vote")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is settled."""

    branches: int = 10
    """Rows of the picker."""
    per_branch_usd: float | None = None
    aggregate_usd: float | None = None
    models: Mapping[int, str] = field(default_factory=dict)
    """By number of the branch, from 1."""
    strategy: MergeKind = "auto_with_fallback"

    def checked(self, max_branches: int) -> Settings:
        """Returns them if they are possible, else raises ValueError."""
        if not 1 <= self.branches <= max_branches:
            raise ValueError(f"a fork has 1 to {max_branches} branches, not {self.branches}")
        for usd in (self.per_branch_usd, self.aggregate_usd):
            if usd is not None and not 0 < usd < float("inf"):
                raise ValueError(f"a budget is more than $0, not ${usd}")
        if self.strategy not in KINDS:
            raise ValueError(f"a strategy is one of {', '.join(KINDS)}, not {self.strategy!r}")
        return self


class SettingsFile:
    """Where they are remembered."""

    def __init__(self, path: Path | None = None, *, max_branches: int = 10) -> None:
        self._path = path or _default_path()
        self._max = max_branches
        self.complaint = ""
        """Why what was remembered could not be used."""

    def load(self) -> Settings:
        """Returns what is remembered, or the defaults."""
        fallback = Settings(branches=min(Settings.branches, self._max))
        try:
            return _settings(json.loads(self._path.read_text(encoding="utf-8"))).checked(self._max)
        except FileNotFoundError:
            return fallback
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self.complaint = f"{self._path} cannot be used ({error}); the defaults are used"
            return fallback

    def save(self, settings: Settings) -> None:
        """Remembers them, whole or not at all. OSError if they cannot be written."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(prefix=".chat-", dir=self._path.parent)
        scratch = Path(name)
        try:
            with os.fdopen(file, "w", encoding="utf-8") as stream:
                json.dump(asdict(settings), stream, indent=1)
            scratch.rename(self._path)
        except BaseException:
            scratch.unlink()
            raise


def _settings(facts: dict[str, Any]) -> Settings:
    models = {int(number): str(model) for number, model in facts.pop("models", {}).items()}
    known = {name: facts[name] for name in asdict(Settings()) if name in facts}
    return replace(Settings(**known), models=models)


def _default_path() -> Path:
    configured = os.environ.get("XDG_CONFIG_HOME")
    return Path(configured or Path.home() / ".config") / "branching" / "chat.json"
