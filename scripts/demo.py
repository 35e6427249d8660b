"""The show behind `scripts/demo`: a published project, one broken line, and three ways to repair it in branches.

The project is cachetools, as its source archive on PyPI has it, judged by its own test suite. Nothing is taken on trust:
after each act the whole tree is compared with what it was, and containers, processes and mounts are looked for.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = "cachetools-5.5.2"
REQUIREMENT = "cachetools==5.5.2 --hash=sha256:1a661caa9175d26759571b2e19580f9d6393969e5dfca11fdb1f947a23e640d4"
SOURCE = "src/cachetools/__init__.py"
CLASS, RIGHT, BROKEN = "class LRUCache(", "next(iter(self.__order))", "next(reversed(self.__order))"
LABEL = "branching.workspace"
# No other process on this machine sleeps for so odd a time, which is how a survivor would be recognised.
SLEEP = "600.25"
TESTS = "PYTHONPATH=src python3 -B -m unittest -q"

Tree = dict[str, tuple[int, int, int, bytes]]


def main() -> int:
    cache = Path(sys.argv[1])
    os.environ["PATH"] = f"{cache / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ.setdefault("BRANCHING_IMAGE", "branching")
    started = time.monotonic()
    build_image(cache / "build.log")
    project = unpack(fetch(cache), cache / "work")
    shutil.copy(ROOT / "scripts" / "repair.py", project)
    published = read_tree(project)

    heading(f"{PROJECT} from PyPI, in {project}: one line of its LRU cache is broken")
    break_line(project)
    show_difference(published, read_tree(project))
    checks = [command(project, "run", "--", "sh", "-c", TESTS) != 0]
    say(checks[-1], "its own tests fail, and nothing of that run was kept")

    edit = f"sed -i '/^{CLASS}/,/key = /s/key = .*/key = {{}}/' {SOURCE} && {TESTS}"
    heading("speculate: four repairs race; the first that passes the tests is committed")
    code = command(
        project,
        "speculate",
        *("--timeout", "60"),
        *("-c", f"echo 'wrong'; {edit.format('max(self.__order)')}"),
        *("-c", f"echo 'does damage'; rm -rf tests docs; echo ruined | tee README.rst {SOURCE} >/dev/null; {TESTS}"),
        *("-c", f"echo 'hangs'; sleep {SLEEP} & sleep {SLEEP}"),
        *("-c", f"echo 'right, and slow'; sleep 2; {edit.format(RIGHT)}"),
    )
    checks += prove(code, project, published)

    heading("best-of-n: four attempts, each scored by the share of tests that pass; the best is committed")
    break_line(project)
    code = command(project, "best-of-n", "-n", "4", "--", "python3", "-B", "repair.py", "--score")
    checks += prove(code, project, published)

    heading("reflexion: one attempt after another, each told what became of the one before")
    break_line(project)
    critique = "python3 -B repair.py --critique"
    code = command(
        project, "reflexion", "--retries", "4", "--critique", critique, "--", "python3", "-B", "repair.py"
    )
    checks += prove(code, project, published)

    seconds = time.monotonic() - started
    heading(f"{sum(checks)} of {len(checks)} checks hold, {seconds:.0f} s. The project is in {project}")
    return 0 if all(checks) else 1


def build_image(log: Path) -> None:
    """Builds the image; the builder's cache makes this a second's work when nothing changed."""
    image = os.environ["BRANCHING_IMAGE"]
    print(f"demo: building the image \"{image}\" (a few minutes the first time; {log})", flush=True)
    with log.open("w") as output:
        built = subprocess.run(["branching-docker", "build", ROOT], stdout=output, stderr=subprocess.STDOUT)
    if built.returncode:
        print(*log.read_text(errors="replace").splitlines()[-20:], sep="\n", file=sys.stderr)
        sys.exit(f"demo: the image was not built.\nHint: the reason is above and in {log}")


def fetch(cache: Path) -> Path:
    """Returns the project's source archive, downloaded once and verified."""
    archive = cache / f"{PROJECT}.tar.gz"
    if not archive.exists():
        wanted = cache / "project.txt"
        wanted.write_text(f"{REQUIREMENT}\n")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        pip += ["--no-deps", "--no-binary", ":all:", "--require-hashes", "--dest", str(cache), "-r", str(wanted)]
        if subprocess.run(pip).returncode:
            sys.exit(f"demo: {PROJECT} could not be downloaded.\nHint: the reason is above; is PyPI within reach?")
    return archive


def unpack(archive: Path, work: Path) -> Path:
    """Returns a fresh copy of the project."""
    shutil.rmtree(work, ignore_errors=True)
    with tarfile.open(archive) as opened:
        opened.extractall(work, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return work / PROJECT


def break_line(project: Path) -> None:
    """Makes the LRU cache drop the newest entry instead of the oldest."""
    before, head, after = (project / SOURCE).read_text().partition(CLASS)
    (project / SOURCE).write_text(before + head + after.replace(RIGHT, BROKEN, 1))


def command(project: Path, *arguments: str) -> int:
    """Shows and runs the wrapper on the project, and returns its exit code."""
    shown = " ".join(word if len(word) < 3 or word.isalnum() else shlex.quote(word) for word in arguments)
    print(f"$ branching-docker -w {project.name} {shown}".replace(" -c ", " \\\n      -c "), flush=True)
    return subprocess.run(["branching-docker", "-w", str(project), *arguments]).returncode


def prove(code: int, project: Path, published: Tree) -> list[bool]:
    """Shows what was committed and what is left, and returns what holds."""
    now = read_tree(project)
    facts = [
        (code == 0, "a winner was committed"),
        (now == published, f"the project is as published again: all {len(now)} entries, with modes and owners"),
        (not containers(project), "no container is left"),
        (not processes(), "no process is left"),
        (not mounts(project), "no mount is left"),
    ]
    if now != published:
        show_difference(published, now)
    for fact in facts:
        say(*fact)
    return [holds for holds, _ in facts]


def read_tree(project: Path) -> Tree:
    """Returns every entry with its mode, owner, group and content. `.branching` counts: it must be gone."""
    tree: Tree = {}
    for path in sorted(project.rglob("*")):
        status = path.lstat()
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        tree[str(path.relative_to(project))] = (status.st_mode, status.st_uid, status.st_gid, content)
    return tree


def show_difference(before: Tree, after: Tree) -> None:
    """Prints what differs between two trees."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old and new and old[:3] != new[:3]:
            print(f"{name}: mode and owner {old[:3]} became {new[:3]}")
        texts = [entry[3].decode(errors="replace").splitlines() if entry else [] for entry in (old, new)]
        print(*difflib.unified_diff(*texts, f"a/{name}", f"b/{name}", n=1, lineterm=""), sep="\n", end="")
        if old != new:
            print()


def containers(project: Path) -> list[str]:
    """Returns the containers that work on the project, running or not."""
    query = ["docker", "ps", "--all", "--quiet", "--filter", f"label={LABEL}={project}"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()


def processes() -> list[str]:
    """Returns what is left of the candidate that hangs, where this system shows containers' processes (Linux)."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended while we looked
        if SLEEP.encode() in words:
            commands.append(str(entry))
    return commands


def mounts(project: Path) -> list[str]:
    """Returns the mounts of this machine on or below the project."""
    table = Path("/proc/self/mountinfo")
    place = str(project).replace(" ", r"\040")
    return [line for line in table.read_text().splitlines() if f" {place}" in line] if table.exists() else []


def heading(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"\n{bold}{text}{plain}", flush=True)


def say(holds: bool, fact: str) -> None:
    print(f"  {'holds' if holds else 'FAILS'}  {fact}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
