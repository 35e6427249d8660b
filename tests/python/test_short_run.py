"""`branching run` without Typer: the same options as with it, and little that is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from typer.testing import CliRunner

import branching.cli.run
from branching.cli.app import app
from branching.cli.run_plan import RunPlan, read_short_run

MODULES_MAX = 67
"""Modules of `branching` that a short command loads."""
THREADS_MAX = 1
"""Threads that it starts one after the other, in a mounted workspace."""
NOT_NEEDED = {
    *("typer", "click", "rich", "pydantic", "asyncio"),
    *("secrets", "hashlib", "random", "tempfile", "pickle", "platform", "fractions", "shutil"),
    *("branching.process.cgroup", "branching.fs.daxfs", "branching.patterns.process_isolation"),
}
"""Modules that take long to load, and that only other commands use."""


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def plan_of_typer(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> RunPlan:
    plans: list[RunPlan] = []

    def note_plan(plan: RunPlan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(branching.cli.run, "run_command", note_plan)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    return plans[0]


def facts(plan: RunPlan) -> dict[str, Any]:
    """Returns what a plan asks for. Arguments of a command that are its defaults are left out."""
    found = {name: value for name, value in plan._asdict().items() if name != "place"}
    defaults = {"hide": (), "network": True, "clean_env": False, "env": {}}
    own = {name: value for name, value in plan.isolation.items() if value != defaults[name]}
    return found | {"isolation": own}


@pytest.mark.parametrize(
    "line",
    [
        "run true",
        "run -- true",
        "run -q -- make test",
        "run --quiet -v --json --no-log --drop-rest make -q --json -- x",
        "run -w . -b fix --branch other --workspace /tmp/x -- sh -c -q",
        "run -w a -- -x",
        "run a -- b",
        "run --on-success keep --on-error none -- true",
    ],
)
def test_common_lines_are_read_as_typer_reads_them(
    monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    plan = read_short_run(line.split()[1:])
    assert plan is not None
    assert facts(plan) == facts(plan_of_typer(monkeypatch, line.split()))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--"],
        ["--", ""],
        ["--help"],
        ["-qv", "--", "true"],
        ["-wx", "--", "true"],
        ["--branch=x", "--", "true"],
        ["--timeout", "5m", "--", "true"],
        ["-b"],
        ["-b", "", "--", "true"],
        ["-b", "--", "true"],
        ["--on-error", "comit", "--", "true"],
    ],
)
def test_all_other_lines_are_for_typer(words: list[str]) -> None:
    assert read_short_run(words) is None


def test_settings_are_for_typer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "branching").mkdir()
    settings = tmp_path / "branching" / "config.toml"
    settings.touch()
    assert read_short_run(["true"]) is not None
    settings.write_text("quiet = true\n")
    assert read_short_run(["true"]) is None
    settings.unlink()
    settings.mkdir()
    assert read_short_run(["true"]) is None, "Typer's way reports what cannot be read"
    settings.rmdir()
    monkeypatch.setenv("BRANCHING_SETTINGS", "quiet = true")
    assert read_short_run(["true"]) is None


REPORT = """
import atexit, sys, threading
started = []
start = threading.Thread.start
threading.Thread.start = lambda thread: (started.append(thread.name), start(thread))
atexit.register(lambda: print(*sys.modules, "|", *started, sep="\\n"))
sys.argv = ["branching", "run", "-q", "--", "true"]
from branching.__main__ import main
main()
"""


def test_a_short_command_loads_little_and_starts_few_threads(real: Mounted) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPORT], cwd=real.root, capture_output=True, text=True, check=True
    )
    names = done.stdout.splitlines()
    loaded, started = names[: names.index("|")], names[names.index("|") + 1 :]
    assert not {*loaded} & NOT_NEEDED
    ours = [name for name in loaded if name.split(".")[0] == "branching"]
    assert len(ours) <= MODULES_MAX, ours
    assert len(started) <= THREADS_MAX, started
