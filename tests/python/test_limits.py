"""ResourceLimits and sizes: valid and invalid values."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from branching.process.limits import ResourceLimits, parse_memory_size

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


@pytest.mark.contract("3.19")
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", MIB),
        ("512K", 512 * KIB),
        ("512k", 512 * KIB),
        ("512M", 512 * MIB),
        ("1.5G", 3 * GIB // 2),
        ("2t", 2 * TIB),
        ("0.1K", 102),
        (" 64M ", 64 * MIB),
        ("64 M", 64 * MIB),  # the published package takes it
        ("9007199254740993", 9007199254740993),  # a float would lose the last bit
    ],
)
def test_a_size_counts_by_1024(text: str, size: int) -> None:
    assert parse_memory_size(text) == size


@pytest.mark.contract("3.19")
@pytest.mark.parametrize(
    "text",
    ["", "M", "-1", "1e9", "512MB", "512 M B", "1.M", ".5G", "1,5G", "0x10", "inf", "\u0661M"],
)
def test_an_invalid_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_memory_size(text)


@pytest.mark.contract("3.12", "3.13")
def test_without_arguments_nothing_is_limited() -> None:
    limits = ResourceLimits()
    assert {getattr(limits, name) for name in limits.__dataclass_fields__} == {None, False}
    assert not limits.needs_cgroup


def test_memory_and_cpu_may_be_given_by_position() -> None:
    assert ResourceLimits(1 << 20, 0.5) == ResourceLimits(memory=1 << 20, cpu=0.5)
    with pytest.raises(TypeError):
        ResourceLimits(1 << 20, 0.5, 1 << 19)  # type: ignore[call-arg]


@pytest.mark.contract("3.12")
def test_limits_are_frozen_and_equal_by_value() -> None:
    limits = ResourceLimits(memory=MIB, cpu=0.5)
    assert limits == ResourceLimits(memory=MIB, cpu=0.5)
    with pytest.raises(FrozenInstanceError):
        limits.memory = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["memory", "memory_high", "pids", "disk", "cpu", "wall_time"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_is_more_than_zero(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be more than zero"):
        ResourceLimits(**{name: value})


@pytest.mark.parametrize("name", ["cpu", "wall_time"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_limit_is_finite(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        ResourceLimits(**{name: value})


def test_a_share_of_cpu_too_small_for_the_kernel_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cpu must be 0\.001 or more"):
        ResourceLimits(cpu=0.0009)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory", "512M"),
        ("memory", 1e9),
        ("memory", True),
        ("pids", 2.0),
        ("cpu", "0.5"),
        ("cpu", True),
        ("oom_group", 1),
        ("wall_time", "60"),
    ],
)
def test_a_limit_of_the_wrong_type_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be"):
        ResourceLimits(**{name: value})


@pytest.mark.parametrize(
    ("limits", "needed"),
    [
        ({"memory": 1}, True),
        ({"memory_high": 1}, True),
        ({"oom_group": True}, True),
        ({"cpu": 1}, True),
        ({"pids": 1}, True),
        ({"disk": 1, "wall_time": 1}, False),
    ],
)
def test_it_knows_whether_a_control_group_is_needed(limits: Any, needed: bool) -> None:
    assert ResourceLimits(**limits).needs_cgroup is needed
