"""Names that complete a word: called in an interpreter of a session, as a function."""

from __future__ import annotations

import sys

NAMES_MAX = 1000
SECONDS_MAX = 2.0
"""Time that user code behind an attribute may take."""


def names(word: str) -> list[str]:
    """Returns the completions of a dotted name, among the variables of `__main__`.

    An attribute of an object is looked up as Python's own prompt does it, which may run code of
    the object.
    """
    import rlcompleter  # needed at a prompt only

    completer = rlcompleter.Completer(vars(sys.modules["__main__"]))
    found = completer.attr_matches(word) if "." in word else completer.global_matches(word)
    return sorted(set(found))[:NAMES_MAX]
