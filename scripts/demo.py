"""The show behind `scripts/demo`: a published project, one broken line, and three ways to repair it in branches.

The project is cachetools, as its source archive on PyPI has it, judged by its own tests. Nothing is taken on trust:
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
RIGHT, BROKEN = "next(iter(self.__order))", "next(reversed(self.__order))"
REPAIR = "./repair.py"
LABEL = "branching.workspace"
SLEEP = "600.25"  # of repair.py's candidate that hangs

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

    heading(f"{PROJECT} as published, in {project}: one line of its LRU cache is broken")
    broken = break_line(project)
    show_difference(published, broken)
    code = command(project, "run", "--", REPAIR, "tests")
    checks = [say(code != 0, "its own tests fail"), say(read_tree(project) == broken, "that run left nothing behind")]

    heading("speculate: four repairs race; the first that passes the tests is committed")
    candidates = [word for name in ("wrong", "damage", "hang", "right") for word in ("-c", f"{REPAIR} {name}")]
    code = command(project, "speculate", "--timeout", "60", *candidates)
    checks += prove(code, project, broken, published)

    heading("best-of-n: four attempts, scored by the share of tests that pass; the best is committed")
    break_line(project)
    code = command(project, "best-of-n", "-n", "4", "--", REPAIR, "score")
    checks += prove(code, project, broken, published)

    heading("reflexion: one attempt after another, each told what became of the one before")
    break_line(project)
    critique = f"{REPAIR} critique"
    code = command(project, "reflexion", "--retries", "4", "--critique", critique, "--", REPAIR, "learn")
    checks += prove(code, project, broken, published)

    seconds = time.monotonic() - started
    heading(f"{sum(checks)} of {len(checks)} checks hold, {seconds:.0f} s. The project is in {project}")
    return 0 if all(checks) else 1


def build_image(log: Path) -> None:
    """Builds the image; the builder's cache makes this a second's work when nothing changed."""
    image = os.environ["BRANCHING_IMAGE"]
    print(f'demo: building the image "{image}" (a few minutes the first time; {log})', flush=True)
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
        if hasattr(tarfile, "data_filter"):
            opened.extractall(work, filter="data")
        else:  # before Python 3.10.12; the archive's hash was verified
            opened.extractall(work)
    return work / PROJECT


def break_line(project: Path) -> Tree:
    """Makes the LRU cache drop the newest entry instead of the oldest, and returns the broken tree."""
    before, head, after = (project / SOURCE).read_text().partition("class LRUCache(")
    (project / SOURCE).write_text(before + head + after.replace(RIGHT, BROKEN, 1))
    return read_tree(project)


def command(project: Path, *arguments: str) -> int:
    """Shows and runs the wrapper on the project, and returns its exit code."""
    shown = shlex.join(arguments).replace(" -c ", " \\\n      -c ")
    print(f"$ branching-docker -w {project.name} {shown}", flush=True)
    return subprocess.run(["branching-docker", "-w", str(project), *arguments]).returncode


def prove(code: int, project: Path, broken: Tree, published: Tree) -> list[bool]:
    """Shows what was committed and what is left, and returns what holds."""
    now = read_tree(project)
    print("committed:")
    show_difference(broken, now)
    return [
        say(code == 0, "a winner was committed"),
        say(now == published, f"the project is as published again: {len(now)} entries, with their modes and owners"),
        say(not containers(project), "no container is left"),
        say(not processes(), "no process is left"),
        say(not mounts(project), "no mount is left"),
    ]


def read_tree(project: Path) -> Tree:
    """Returns every entry with its mode, owner, group and content; of `.branching` what no undo or log needs."""
    tree: Tree = {}
    for path in sorted(project.rglob("*")):
        parts = path.relative_to(project).parts
        if parts[0] == ".branching" and (len(parts) < 3 or parts[1] in ("history", "logs")):
            continue
        status = path.lstat()
        content = bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        tree[str(path.relative_to(project))] = (status.st_mode, status.st_uid, status.st_gid, content)
    return tree


def show_difference(before: Tree, after: Tree) -> None:
    """Prints what differs between two trees."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old and new and old[:3] != new[:3]:
            print(f"{name}: mode and owner {old[:3]} became {new[:3]}")
        a, b = (entry[3].decode(errors="replace").splitlines() if entry else [] for entry in (old, new))
        print(*difflib.unified_diff(a, b, f"a/{name}", f"b/{name}", n=1, lineterm=""), sep="\n", end="")
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


def say(holds: bool, fact: str) -> bool:
    print(f"  {'holds' if holds else 'FAILS'}  {fact}", flush=True)
    return holds


if __name__ == "__main__":
    sys.exit(main())
