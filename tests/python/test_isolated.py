"""Patterns whose candidates run in processes of their own: `isolate_processes` and limits."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.traces import processes_in

from branching import (
    BeamSearch,
    BestOfN,
    Cascaded,
    Event,
    Reflexion,
    ResourceLimits,
    Speculate,
    Tournament,
    TreeOfThoughts,
    Workspace,
)
from branching.patterns.command_candidate import Program, shell

MIB = 1 << 20
LONG = 300.0


def pid_of(path: Path, *_: object) -> bool:
    (path / "pid").write_text(str(os.getpid()))
    return True


def says_pid(path: Path, *_: object) -> tuple[bool, str]:
    return pid_of(path), ""


@pytest.mark.contract("0.3", "3.15", "3.16", "3.17", "3.18")
@pytest.mark.parametrize(
    "make",
    [
        lambda how: Speculate([pid_of], **how),
        lambda how: BestOfN(pid_of, 2, **how),
        lambda how: Reflexion(pid_of, 2, **how),
        lambda how: TreeOfThoughts([pid_of, pid_of], **how),
        lambda how: BeamSearch([pid_of], expand=lambda path, depth: [pid_of], **how),
        lambda how: Tournament([pid_of, pid_of], judge=lambda a, b: 0, **how),
        lambda how: Cascaded(says_pid, **how),
    ],
    ids=["speculate", "best", "reflexion", "tree", "beam", "tournament", "cascaded"],
)
@pytest.mark.parametrize(
    "how",
    [
        {"isolate_processes": True},
        {"resource_limits": ResourceLimits()},
        {"group_limits": ResourceLimits(pids=100)},
    ],
    ids=["asked", "limits", "group"],
)
def test_every_pattern_takes_it(real_workspace: Workspace, make: Any, how: dict[str, Any]) -> None:
    outcome = make(how)(real_workspace)
    assert outcome.committed
    pid = int((real_workspace.path / "pid").read_text())
    assert pid != os.getpid()
    assert outcome.winner.process is not None
    assert outcome.winner.process.success


@pytest.mark.contract("4.26", "4.31", "4.32")
def test_closures_reach_it_and_values_come_back(real_workspace: Workspace) -> None:
    heard: list[str] = []

    class Mine(Exception):
        pass

    def raises(path: Path) -> bool:
        heard.append("lost")
        raise Mine("words")

    def returns(path: Path) -> tuple[bool, float]:
        return True, 0.5

    outcome = BestOfN([raises, returns], isolate_processes=True)(real_workspace)
    assert heard == []
    first, second = outcome.all_results
    assert (first.state, type(first.exception)) == ("error", Mine)
    assert (second.return_value, second.score) == ((True, 0.5), 0.5)


def test_all_see_the_same_path(real_workspace: Workspace) -> None:
    def look(path: Path) -> str:
        return f"{path} {Path.cwd()}"

    outcome = Speculate([look] * 3, first_wins=False, isolate_processes=True)(real_workspace)
    said = {result.return_value for result in outcome.all_results}
    assert said == {f"{real_workspace.root} {real_workspace.root}"}


@pytest.mark.contract("0.4", "4.12")
def test_losers_are_killed_though_they_are_functions(real_workspace: Workspace) -> None:
    def slow(path: Path) -> bool:
        time.sleep(LONG)
        return True

    started = time.monotonic()
    outcome = Speculate([slow, pid_of, slow], isolate_processes=True)(real_workspace)
    assert time.monotonic() - started < LONG / 2
    assert [result.state for result in outcome.all_results] == ["cancelled", "won", "cancelled"]
    assert processes_in(real_workspace.root) == []


@pytest.mark.contract("4.17")
def test_the_timeout_kills_functions(real_workspace: Workspace) -> None:
    def slow(path: Path) -> bool:
        time.sleep(LONG)
        return True

    outcome = BestOfN([slow], isolate_processes=True, timeout=1)(real_workspace)
    assert outcome.all_results[0].state == "timed_out"
    assert processes_in(real_workspace.root) == []


def test_their_output_is_reported(real_workspace: Workspace) -> None:
    said: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "output":
            said.append(event.text)

    def talks(path: Path) -> bool:
        print("from function", os.environ["BRANCHING_ATTEMPT"])
        return True

    Speculate([talks], isolate_processes=True, on_event=listen)(real_workspace)
    assert said == ["from function 0"]


@pytest.mark.contract("3.15")
@pytest.mark.parametrize("kind", ["function", "command"])
def test_the_memory_limit_holds(real_workspace: Workspace, kind: str) -> None:
    """The published package commits this."""

    def hog(path: Path) -> bool:
        return bool(bytearray(200 * MIB))

    script = "python3 -c 'x = bytearray(200 << 20)'"
    command = Program(shell(f"exec {script}"), workspace=real_workspace.root, owner=None)
    candidate = hog if kind == "function" else command
    limits = ResourceLimits(memory=64 * MIB)
    outcome = Speculate([candidate], resource_limits=limits)(real_workspace)
    result = outcome.all_results[0]
    assert not outcome.committed
    assert result.process is not None
    assert (result.process.how, result.exit_code) == ("oom", 137)


def test_a_killed_child_of_a_function_that_returns_false_is_named(
    real_workspace: Workspace,
) -> None:
    def starts_a_hog(path: Path) -> bool:
        hog = ["python3", "-c", "x = bytearray(200 << 20)"]
        return subprocess.run(hog, check=False).returncode == 0

    limits = ResourceLimits(memory=64 * MIB)
    outcome = Speculate([starts_a_hog], resource_limits=limits)(real_workspace)
    [result] = outcome.all_results
    assert result.return_value is False
    assert result.process is not None
    assert result.process.how == "oom"
    assert "out of memory" in result.process.reason


def test_the_disk_limit_holds_and_is_reported(real_workspace: Workspace) -> None:
    def fill(path: Path) -> bool:
        (path / "big").write_bytes(bytes(4 * MIB))
        return True

    limits = ResourceLimits(disk=MIB)
    outcome = Speculate([fill], resource_limits=limits)(real_workspace)
    result = outcome.all_results[0]
    assert not outcome.committed
    assert result.process is not None
    assert result.process.how == "disk"


@pytest.mark.contract("3.18")
def test_the_group_is_limited_together(real_workspace: Workspace) -> None:
    class OneHasEnded(Exception):
        pass

    def hold(path: Path) -> bool:
        held = bytearray(60 * MIB)
        time.sleep(LONG)
        return bool(held)

    def listen(event: Event) -> None:
        if event.kind == "finished":
            raise OneHasEnded(event.text)

    limits = ResourceLimits(memory=120 * MIB)
    pattern = Speculate([hold] * 4, first_wins=False, group_limits=limits, on_event=listen)
    with pytest.raises(OneHasEnded, match="out of memory"):
        pattern(real_workspace)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resource_limits": 5}, "resource_limits must be ResourceLimits"),
        ({"group_limits": "1G"}, "group_limits must be ResourceLimits"),
        ({"isolate_processes": True, "runner": print}, "elsewhere"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Speculate([print], **options)


def test_the_group_has_a_disk_limit_for_functions_too(real_workspace: Workspace) -> None:
    def fill(path: Path) -> bool:
        (path / "big").write_bytes(bytes(4 * MIB))
        return True

    outcome = Speculate([fill], group_limits=ResourceLimits(disk=MIB))(real_workspace)
    assert not outcome.committed


def test_the_setup_runs_apart_too(real_workspace: Workspace) -> None:
    def setup(path: Path) -> None:
        (path / "setup-pid").write_text(str(os.getpid()))

    outcome = Speculate([pid_of], setup=setup, isolate_processes=True)(real_workspace)
    assert outcome.committed
    assert int((real_workspace.path / "setup-pid").read_text()) != os.getpid()


class TestWalls:
    """Functions take the same environment options as commands."""

    def test_they_are_those_of_branch_context(
        self, real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (real_workspace.path / ".env").write_text("secret")
        monkeypatch.setenv("TEST_KEY", "secret")

        def look(path: Path) -> tuple[object, ...]:
            try:
                secret = (path / ".env").read_text()
            except PermissionError:
                secret = "denied"
            interfaces = [name for _, name in socket.if_nameindex()]
            return secret, interfaces, os.environ.get("TEST_KEY"), os.environ["MINE"]

        pattern = Speculate(
            [look], hide=["**/.env"], network=False, clean_env=True, env={"MINE": "yes"}
        )
        [result] = pattern(real_workspace).all_results
        assert result.return_value == ("denied", ["lo"], None, "yes"), result.exception

    def test_without_a_sandbox_it_works_in_the_directory_itself(
        self, real_workspace: Workspace
    ) -> None:
        def look(path: Path) -> tuple[Path, int]:
            return path, os.getppid()

        [result] = Speculate([look], isolation="none")(real_workspace).all_results
        assert isinstance(result.return_value, tuple), result.exception
        assert result.return_value[0] == result.branch_path
        assert result.return_value[1] != os.getpid()

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"hide": "**/.env"}, TypeError, "sequence of globs"),
            ({"hide": ["/etc/passwd"]}, ValueError, "not a glob"),
            ({"isolation": "some"}, ValueError, "isolation must be"),
            ({"isolation": "none", "hide": ["x"]}, ValueError, "need the sandbox"),
            ({"isolation": "none", "network": False}, ValueError, "need the sandbox"),
            ({"hide": ["x"], "runner": print}, TypeError, "elsewhere"),
        ],
    )
    def test_invalid_arguments_are_refused(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            Speculate([print], **options)

    def test_an_isolation_option_that_a_command_would_not_get_is_refused(
        self, real_workspace: Workspace
    ) -> None:
        command = Program(["true"], workspace=real_workspace.root, owner=None)
        with pytest.raises(TypeError, match="for functions"):
            Speculate([command], hide=["**/.env"])(real_workspace)
