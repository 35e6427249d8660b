"""The tree of exceptions."""

from __future__ import annotations

import pickle

import pytest

import branching
from branching import BranchingError, ConflictError

PARENTS = {
    "MountError": "BranchingError",
    "BranchError": "BranchingError",
    "BranchStaleError": "BranchError",
    "BranchNotFoundError": "BranchError",
    "CommitError": "BranchError",
    "ConflictError": "CommitError",
    "AbortError": "BranchError",
    "RecoveryError": "BranchError",
    "ProcessBranchError": "BranchingError",
    "ForkError": "ProcessBranchError",
    "NamespaceError": "ProcessBranchError",
    "MemoryBranchError": "BranchingError",
}


@pytest.mark.contract("5.1")
@pytest.mark.parametrize(("name", "parent"), PARENTS.items())
def test_each_exception_has_its_published_parent(name: str, parent: str) -> None:
    assert getattr(branching, name).__mro__[1] is getattr(branching, parent)


def test_an_exception_keeps_its_facts_through_a_pickle() -> None:
    error = ConflictError("lost", hint="merge", branch="a", path="/w", paths=("x",), limit="m")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConflictError
    assert vars(copy) == vars(error)
    assert copy.message == "lost"


def test_the_text_ends_with_the_hint() -> None:
    assert str(BranchingError("it broke", hint="mend it")) == "it broke\nHint: mend it"
    assert str(BranchingError("it broke")) == "it broke"
    assert str(BranchingError()) == ""
