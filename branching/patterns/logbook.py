"""Former module of the run log, for programs that still import it; see `branching.runlog`."""

from __future__ import annotations

from branching.runlog.run_log import Entry, RunLog

__all__ = ["Entry", "Logbook"]


class Logbook(RunLog):
    """RunLog under its former name."""

    steered = RunLog.controlled
