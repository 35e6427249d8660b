"""Where `finished` is looked for by those who work with branches; see `branching.awaited`."""

from __future__ import annotations

from branching.awaited import finished

__all__ = ["finished"]
