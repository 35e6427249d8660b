"""Results from a sandbox are untrusted: decoding them creates values and calls no function."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import enum
import fcntl
import io
import ipaddress
import mmap
import os
import pickle
import resource
import subprocess
import uuid
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from branching import ProcessBranchError
from branching.process.functions import result_channel, safe_unpickle

MEMORY_BYTES_MAX = 2 << 30

called: list[object] = []


def own_function(*arguments: object) -> object:
    called.append(arguments)
    return arguments


class Own:
    def __init__(self, *arguments: object) -> None:
        called.append(arguments)


class Dropped(Own):
    def __del__(self) -> None:
        called.append("dropped")


class Restored:
    def __setstate__(self, state: object) -> None:
        called.append(state)


class Filled:
    kept: object

    @property
    def text(self) -> str:
        return ""

    @text.setter
    def text(self, value: str) -> None:
        called.append(value)

    def __setattr__(self, name: str, value: object) -> None:
        called.append(value)

    def append(self, value: object) -> None:
        called.append(value)

    def extend(self, values: object) -> None:
        called.append(values)

    def __setitem__(self, key: object, value: object) -> None:
        called.append(value)

    def __index__(self) -> int:
        called.append("index")
        return 1


class Runs(subprocess.Popen):  # type: ignore[type-arg]
    pass


class Tuple(tuple):  # type: ignore[type-arg]
    pass


class Named(NamedTuple):
    when: datetime.date
    where: str


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("x",)
    x: int


class Flags(enum.Flag):
    A = 1
    B = 2


class Words(dict):  # type: ignore[type-arg]
    pass


ORIGINALS = [own_function, Own, Filled]


@pytest.fixture
def result() -> Iterator[int]:
    called.clear()
    descriptor = result_channel.new_file()
    # What has no end must not take the machine's memory on its way.
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, before[1]))
    yield descriptor
    resource.setrlimit(resource.RLIMIT_AS, before)
    os.close(descriptor)


def heard(descriptor: int, data: bytes, accept: Any = ()) -> result_channel.CallOutcome:
    os.pwrite(descriptor, len(data).to_bytes(8, "little") + data, 0)
    return result_channel.read(descriptor, ORIGINALS, accept)


def value(made: bytes) -> bytes:
    """The bytes of a returned value that is made by pickle's instructions."""
    return b"\x80\x05X\x05\0\0\0value" + made + b"\x86."


def named(thing: Any) -> bytes:
    return b"c" + f"{thing.__module__}\n{thing.__qualname__}\n".encode()


MARK = b"X\x04\0\0\0mark"
HOSTILE = {
    "a function of the program's": b"K\0Q" + MARK + b"\x85R",
    "a class of the program's": b"K\x01Q" + MARK + b"\x85R",
    "a class by its name": named(Own) + MARK + b"\x85R",
    "a class, the old way": b"(" + MARK + b"i" + named(Own)[1:],
    "a class, the other old way": b"(" + named(Own) + MARK + b"o",
    "keyword arguments": named(Own) + b")}\x92",
    "a class that starts a program": named(Runs) + b"]" + MARK + b"a\x85R",
    "an instance whose end does something": named(Dropped) + b")\x81",
    "a state that is taken by code": named(Restored) + b")\x81" + MARK + b"b",
    "a change of a class": b"K\x02QN}X\x01\0\0\0xK\x01s\x86b",
    "a change of a function": b"K\0Q}X\x01\0\0\0xK\x01sb",
    "an append": named(Filled) + b")\x81" + MARK + b"a",
    "an extension": named(Filled) + b")\x81(" + MARK + MARK + b"e",
    "an entry": named(Filled) + b")\x81" + MARK + MARK + b"s",
    "entries": named(Filled) + b")\x81(" + MARK + MARK + b"u",
    "the system": b"cos\nsystem\n" + MARK + b"\x85R",
    "what a module holds": b"cbranching.process.homeway\nos.system\n" + MARK + b"\x85R",
    "a reconstructor": b"ccopyreg\n_reconstructor\n" + named(Own) + named(Own) + MARK + b"\x87R",
    "a range to an object": b"cbuiltins\nrange\n" + named(Filled) + b")\x81\x85R",
    "a set without end": b"cbuiltins\nset\ncbuiltins\nrange\nI1000000000000\n\x85R\x85R",
    "a tuple without end": named(Tuple) + b"cbuiltins\nrange\nI1000000000000\n\x85R\x85\x81",
    "a number without end": b"cfractions\nFraction\nX\x08\0\0\0001E999999\x85R",
    "an address without end": b"ccollections\ndeque\n" + named(ipaddress.IPv6Network)
    + b"X\x04\0\0\0::/0\x85R\x85R",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_call_nothing_of_the_programs(result: int, name: str) -> None:
    outcome = heard(result, value(HOSTILE[name]))
    assert called == []
    assert isinstance(outcome.exception, ProcessBranchError), outcome
    assert "not accepted" in str(outcome.exception)
    assert not hasattr(Filled, "x")
    assert not hasattr(own_function, "x")


def test_a_state_is_put_in_without_a_word_of_the_class(result: int) -> None:
    state = b"}X\x04\0\0\0textX\x01\0\0\0xsb"
    made = heard(result, value(named(Filled) + b")\x81" + state)).value
    assert (type(made), vars(made), called) == (Filled, {"text": "x"}, [])


def test_holes_are_no_result(result: int) -> None:
    """They cost the sandbox nothing."""
    os.pwrite(result, ((1 << 40) - 8).to_bytes(8, "little"), 0)
    os.truncate(result, 1 << 40)
    assert "not the size" in str(result_channel.read(result, [], []).exception)


@pytest.mark.parametrize(
    "thing",
    [
        Named(datetime.date(2026, 1, 1), "x"),
        Slotted(1),
        Flags.A | Flags.B,
        Words(a=1),
        Tuple((1, 2)),
        collections.OrderedDict(a=1),
        collections.defaultdict(None, a=1),
        collections.Counter("aab"),
        collections.deque([1, 2], 3),
        collections.ChainMap({"a": 1}),
        array.array("i", [1, 2]),
        {1, "a"},
        range(10**12),
        (slice(1, 2), ...),
        Decimal("1E+1000"),
        Fraction(-1, 3),
        datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1),
        uuid.UUID(int=5),
        ipaddress.ip_network("10.0.0.0/8"),
        Path("/x"),
        (KeyError("x"), FileNotFoundError(2, "no", "f"), own_function, Own),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_values_are_made_as_they_were(result: int, thing: Any) -> None:
    class Packer(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            return ORIGINALS.index(part) if part in (own_function, Own) else None

    data = io.BytesIO()
    Packer(data, protocol=5).dump(("value", thing))
    outcome = heard(result, data.getvalue())
    assert outcome.exception is None, outcome.exception
    assert (type(outcome.value), repr(outcome.value)) == (type(thing), repr(thing))
    assert called == []


def test_types_with_their_own_constructor_have_to_be_allowed_by_name(result: int) -> None:
    data = value(named(Own) + MARK + b"\x85R")
    assert type(heard(result, data, [Own]).value) is Own
    assert called == [("mark",)]


def test_bytes_that_name_nothing_are_read_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_unpickle, "_RestrictedUnpickler", None)
    thing = [1, 2.5, "x", b"y", {"a": (None, True)}, {3}]
    assert safe_unpickle.load(io.BytesIO(pickle.dumps(thing)), [], []) == thing


def test_a_result_cannot_be_changed_once_its_sandbox_has_ended(
    result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sibling may have received the file over a socket."""
    result_channel.write_value(result, list(range(100_000)))
    refused: list[str] = []
    load = safe_unpickle.load

    def attacked(*arguments: Any) -> Any:
        for attack in (
            lambda: os.ftruncate(result, 0),
            lambda: os.pwrite(result, b"x", 20),
            lambda: os.pwrite(result, b"x", 1 << 30),
        ):
            try:
                attack()
            except PermissionError:
                refused.append("refused")
        return load(*arguments)

    monkeypatch.setattr(safe_unpickle, "load", attacked)
    assert result_channel.read(result, [], []).value == list(range(100_000))
    assert refused == ["refused"] * 3


def test_a_result_that_another_process_has_mapped_for_writing_is_refused(result: int) -> None:
    result_channel.write_value(result, "honest")
    with mmap.mmap(result, 8, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE):
        outcome = result_channel.read(result, [], [])
    assert "mapped for writing" in str(outcome.exception), outcome


def test_seals_set_in_the_sandbox_do_not_keep_the_result_changeable(result: int) -> None:
    result_channel.write_value(result, "honest")
    fcntl.fcntl(result, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    outcome = result_channel.read(result, [], [])
    assert "cannot be read" in str(outcome.exception), outcome


def test_a_result_that_was_cut_off_is_none(result: int) -> None:
    """The sandbox was killed while its function's result was written."""
    result_channel.write_value(result, "honest")
    os.pwrite(result, bytes(8), 0)  # its length comes last
    assert result_channel.read(result, [], []) == result_channel.CallOutcome()


def test_a_result_above_the_limit_is_an_error_that_names_it(
    result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_channel, "RESULT_BYTES_MAX", 1 << 20)
    result_channel.write_value(result, ["x" * 100_000] * 5 + [b"y" * (1 << 20)])
    assert os.fstat(result).st_size < 1 << 20
    error = result_channel.read(result, [], []).exception
    assert "list cannot be sent back: it has more than 1 MiB" in str(error)


def test_a_result_above_the_limit_that_the_sandbox_sent_all_the_same_is_refused(
    result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    result_channel.write_value(result, b"y" * (1 << 20))
    monkeypatch.setattr(result_channel, "RESULT_BYTES_MAX", 1 << 20)
    assert "it has more than 1 MiB" in str(result_channel.read(result, [], []).exception)
