"""Limits on the command line and on commands in patterns: enforcement, messages, leftovers.

test_limits_enforced checks the control groups themselves; these tests check that each option
reaches them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import NAME_FROM, Mounted
from support.command import branching
from support.groups import MIB, version
from typer.testing import CliRunner

from branching import ResourceLimits, Workspace
from branching.cli.app import app
from branching.patterns import BestOfN, Speculate
from branching.patterns.command_candidate import Program, shell
from branching.process.cgroup.own_cgroup import UNIFIED, find_own
from branching.process.cgroup.v2 import LEAF

PYTHON = [sys.executable, "-c"]
HOG = "held = bytearray(200 << 20); open('made', 'w').close()"
FILLER = "dd if=/dev/zero of=filled bs=64k count=100 status=none"
FORKS = """
import os, sys
for _ in range(40):
    try:
        if not os.fork():
            os.read(0, 1)
            os._exit(0)
    except OSError:
        os._exit(3)
"""
CPU_SECONDS = """
import time
end = time.monotonic() + 1.5
while time.monotonic() < end:
    pass
open("used", "w").write(str(time.process_time()))
"""


@pytest.fixture
def root(real: Mounted) -> Path:
    return real.root


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def groups_left() -> list[Path]:
    """Returns the control groups of commands that have ended."""
    found = []
    for controller, own in find_own().items():
        place = own.path.parent if controller == UNIFIED and own.path.name == LEAF else own.path
        for path in place.glob("branching-[0-9]*"):
            if not Path("/proc", path.name.split("-")[1]).exists():
                found.append(path)
    return found


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Any:
    before = set(groups_left())
    yield
    assert not set(groups_left()) - before


class TestRun:
    @pytest.mark.contract("3.15", "6.60")
    def test_a_hog_is_killed_and_nothing_of_it_committed(self, root: Path) -> None:
        """The published package lets it pass, and commits."""
        words = ["run", "--memory-limit", "32M", "--json", "--", *PYTHON, HOG]
        done = branching(root, *words)
        assert (done.code, names(root)) == (137, [NAME_FROM])
        assert done.document["ended"] == "oom"
        assert done.document["action"] == "aborted"
        assert "out of memory" in done.err

    @pytest.mark.contract("6.61")
    def test_a_run_below_its_memory_limit_is_committed(self, root: Path) -> None:
        words = ["run", "--memory-limit", "1G", "--oom-group", "--json", "--", *PYTHON, HOG]
        done = branching(root, *words)
        assert (done.code, names(root)) == (0, ["made", NAME_FROM])
        assert done.document["ended"] == "exit"

    def test_a_full_disk_is_reported(self, root: Path) -> None:
        done = branching(root, "run", "--disk-limit", "1M", "--json", "--", *shell(FILLER))
        assert (done.code, names(root)) == (1, [NAME_FROM])
        assert done.document["ended"] == "disk"
        assert "disk limit reached" in done.err

    def test_a_command_that_handles_a_full_disk_succeeds(self, root: Path) -> None:
        command = shell(f"{FILLER} || rm filled; touch coped")
        done = branching(root, "run", "--disk-limit", "1M", "--json", "--", *command)
        assert (done.code, names(root)) == (0, ["coped", NAME_FROM])
        assert done.document["ended"] == "exit"

    def test_too_many_processes_are_reported(self, root: Path) -> None:
        done = branching(root, "run", "--pids-limit", "10", "--json", "--", *PYTHON, FORKS)
        assert (done.code, done.document["ended"]) == (3, "pids")
        assert "too many processes" in done.err

    @pytest.mark.contract("6.60")
    def test_cpu_time_is_shared_out(self, root: Path) -> None:
        done = branching(root, "run", "--cpu-limit", "0.2", "--", *PYTHON, CPU_SECONDS)
        assert done.code == 0, done.err
        assert float((root / "used").read_text()) < 0.75

    def test_other_failures_are_not_put_down_to_a_limit(self, root: Path) -> None:
        limits = ["--memory-limit", "512M", "--pids-limit", "50", "--disk-limit", "10M"]
        done = branching(root, "run", *limits, "--json", "--", *shell("echo x >file; exit 7"))
        assert (done.code, done.document["ended"]) == (7, "exit")
        done = branching(root, "run", *limits, "--json", "--", *shell("kill -SEGV $$"))
        assert (done.code, done.document["ended"]) == (139, "signal")

    def test_a_command_that_is_not_there_is_127(self, root: Path) -> None:
        assert branching(root, "run", "--memory-limit", "64M", "--", "no-such-program").code == 127

    def test_processes_in_other_sessions_die_with_the_run(self, root: Path) -> None:
        """Its descriptors are closed, too: only the control group finds it."""
        escape = "setsid sleep 86399 </dev/null >/dev/null 2>&1 & echo $! >left"
        done = branching(root, "run", "--pids-limit", "20", "--", *shell(escape))
        assert done.code == 0, done.err
        stat = Path("/proc", (root / "left").read_text().strip(), "cmdline")
        assert not stat.exists() or b"86399" not in stat.read_bytes()

    @pytest.mark.skipif(version() == 2, reason="version 2 has memory_high")
    def test_limits_that_cannot_be_enforced_are_refused_before_anything_runs(
        self, root: Path
    ) -> None:
        words = ["run", "--memory-high", "32M", "--setup", "touch ran", "--", "touch", "ran"]
        done = branching(root, *words)
        assert (done.code, names(root)) == (125, [NAME_FROM])
        assert "the limit on memory_high cannot be enforced" in done.err
        assert "Hint: " in done.err


@pytest.mark.parametrize(
    "words",
    [
        [option, value]
        for option, values in {
            "--memory-limit": ["0", "-1", "lots", "1MB", "", "0.0001K"],
            "--memory-high": ["0", "x"],
            "--disk-limit": ["0", "-5M", "1e6"],
            "--cpu-limit": ["0", "-1", "nan", "inf", "half", "0.0001"],
            "--pids-limit": ["0", "-1", "1.5", "many"],
            "--group-memory-limit": ["0", "x"],
            "--group-cpu-limit": ["0", "x"],
        }.items()
        for value in values
    ],
    ids=" ".join,
)
def test_a_limit_that_is_none_is_a_usage_error(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["speculate", *words, "-c", "true"])
    assert done.exit_code == 2
    assert words[0] in done.stderr


@pytest.mark.contract("6.60", "6.61", "6.62")
@pytest.mark.parametrize("command", ["run", "speculate", "best-of-n", "reflexion"])
def test_the_commands_have_the_limits(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"]).stdout
    limits = ["--memory-limit", "--cpu-limit", "--memory-high", "--oom-group"]
    limits += ["--pids-limit", "--disk-limit"]
    if command != "run":
        limits += ["--group-memory-limit", "--group-cpu-limit"]
    assert [option for option in limits if option not in said] == []


class TestSearches:
    def test_each_candidate_has_its_own_limit(self, root: Path) -> None:
        hog = f"{sys.executable} -c '{HOG.replace(chr(39), chr(34))}'"
        words = ["--memory-limit", "48M", "--disk-limit", "1M", "--json"]
        done = branching(root, "speculate", *words, "-c", hog, "-c", FILLER, "-c", "exit 4")
        assert (done.code, names(root)) == (1, [NAME_FROM])
        assert [each["ended"] for each in done.document["results"]] == ["oom", "disk", "exit"]

    @pytest.mark.contract("3.18", "6.62")
    def test_all_candidates_share_the_groups_limit(self, root: Path) -> None:
        words = ["-n", "2", "--group-memory-limit", "64M", "--group-cpu-limit", "1", "--json"]
        done = branching(root, "best-of-n", *words, "--", *PYTHON, HOG)
        assert (done.code, names(root)) == (1, [NAME_FROM])
        assert {each["ended"] for each in done.document["results"]} == {"oom"}

    def test_reflexion_learns_that_memory_ran_out(self, root: Path) -> None:
        program = f"import os\nif os.environ['BRANCHING_ATTEMPT'] == '0':\n    {HOG}"
        done = branching(
            root, "reflexion", "--memory-limit", "48M", "--json", "--", *PYTHON, program
        )
        assert done.code == 0, done.err
        assert [each["ended"] for each in done.document["results"]] == ["oom", "exit"]


class TestPatterns:
    def program(self, space: Workspace, text: str) -> Program:
        return Program(shell(text), workspace=space.root, owner=None)

    @pytest.mark.parametrize("code", [0, 3])
    def test_usage_counts_all_processes_of_a_command(
        self, real_workspace: Workspace, code: int
    ) -> None:
        """Two at a time hold 50 MiB each; the largest process alone would be about 60 MiB."""
        hold = "held = bytearray(50 << 20); print(flush=True); import time; time.sleep(0.5)"
        text = f"{sys.executable} -c '{hold}' & {sys.executable} -c '{hold}' & wait; exit {code}"
        program = Program(shell(text), workspace=real_workspace.seen_at, owner=None)
        limits = ResourceLimits(memory=600 * MIB)
        outcome = BestOfN([program], resource_limits=limits)(real_workspace)
        process = outcome.all_results[0].process
        assert process is not None
        assert process.exit_code == code
        assert (process.memory_peak or 0) > 90 * MIB

    def test_time_is_limited_for_each(self, real_workspace: Workspace) -> None:
        slow = self.program(real_workspace, "sleep 600")
        limits = ResourceLimits(wall_time=0.3)
        outcome = Speculate([slow], resource_limits=limits)(real_workspace)
        (result,) = outcome.all_results
        assert (outcome.committed, result.return_value.how) == (False, "timeout")  # type: ignore[attr-defined]

    def test_disk_space_is_limited_for_all_together(self, real_workspace: Workspace) -> None:
        """Each alone would fit."""
        quick = self.program(real_workspace, "dd if=/dev/zero of=half bs=1k count=600 status=none")
        group = ResourceLimits(disk=MIB)
        outcome = Speculate([quick, quick], first_wins=False, max_parallel=1, group_limits=group)(
            real_workspace
        )
        assert [each.success for each in outcome.all_results].count(True) == 1
        assert (real_workspace.path / "half").stat().st_size == 600 << 10

    def test_the_setup_counts_in_the_groups_disk_limit(self, real_workspace: Workspace) -> None:
        fill = self.program(real_workspace, "dd if=/dev/zero of=a bs=1k count=900 status=none")
        more = self.program(real_workspace, "dd if=/dev/zero of=b bs=1k count=900 status=none")
        group = ResourceLimits(disk=MIB)
        outcome = BestOfN([more], setup=fill, group_limits=group)(real_workspace)
        (result,) = outcome.all_results
        assert (outcome.committed, result.return_value.how) == (False, "disk")  # type: ignore[attr-defined]
        assert names(real_workspace.path) == [NAME_FROM]
