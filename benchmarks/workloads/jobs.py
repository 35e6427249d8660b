"""Real jobs on real published projects: a cargo build with its dependencies, and a test suite.

Sources are fetched once by cargo and pip into the cache directory, and copied into the base; the
job itself runs offline. Daemon and client are not pinned: a job uses what CPUs there are.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..field.contestant import Cannot, need, run
from ..field.race import Turn, Workload
from ..field.sizes import Size

CLICK = "8.1.7"
MANIFEST = """\
[package]
name = "job"
version = "0.1.0"
edition = "2021"
[dependencies]
serde_json = "=1.0.145"
"""
OFFLINE = """\
[source.crates-io]
replace-with = "vendored-sources"
[source.vendored-sources]
directory = "vendor"
"""


def _kept(name: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "branching-tools/bench" / name


def _cargo_base(directory: Path, size: Size) -> None:
    if not size.jobs:
        raise Cannot(f"not part of the {size.name} mode")
    need("cargo", "cargo")
    kept = _kept("cargo-job")
    if not (kept / "done").exists():
        (kept / "src").mkdir(parents=True, exist_ok=True)
        (kept / ".cargo").mkdir(exist_ok=True)
        (kept / "Cargo.toml").write_text(MANIFEST)
        (kept / "src/main.rs").write_text('fn main() { println!("{}", serde_json::json!([1])); }\n')
        run("cargo", "vendor", "--quiet", "vendor", cwd=kept)
        (kept / ".cargo/config.toml").write_text(OFFLINE)
        (kept / "done").touch()
    run("cp", "-a", f"{kept}/.", directory)


def _cargo(turn: Turn) -> None:
    branch = turn.branch()
    environment = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    for row in ("cargo build of serde_json", "cargo build again, nothing changed"):
        turn.row = row
        with turn.timed(row):
            _job(["cargo", "build", "--quiet", "--offline"], branch, environment)
    said = subprocess.run([branch / "target/debug/job"], capture_output=True, check=True).stdout
    turn.expect(said, b"[1]\n", "the program says")


def _pytest_base(directory: Path, size: Size) -> None:
    if not size.jobs:
        raise Cannot(f"not part of the {size.name} mode")
    kept = _kept(f"click-{CLICK}")
    if not (kept / "tests").exists():
        downloads = _kept("downloads")
        downloads.mkdir(parents=True, exist_ok=True)
        options = ("--quiet", "--no-deps", "--no-binary", ":all:", "--dest", downloads)
        run(sys.executable, "-m", "pip", "download", *options, f"click=={CLICK}")
        run("tar", "-xzf", downloads / f"click-{CLICK}.tar.gz", "-C", kept.parent)
    run(sys.executable, "-c", "import pytest")
    run("cp", "-a", f"{kept}/.", directory)


def _pytest(turn: Turn) -> None:
    branch = turn.branch()
    environment = {**os.environ, "PYTHONPATH": str(branch / "src")}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-o", "addopts=", "tests"]
    with turn.timed(f"pytest of click {CLICK}"):
        _job([*command, "-k", "not pager and not echo_via", "-x"], branch, environment)


def _job(command: list[str], directory: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Cannot(f"{command[0]} failed: {said[-1] if said else done.returncode}")


CARGO = Workload(name="a build", base=_cargo_base, work=_cargo, pinned=False)
PYTEST = Workload(name="a test suite", base=_pytest_base, work=_pytest, pinned=False)
