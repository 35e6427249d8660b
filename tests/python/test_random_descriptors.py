"""Sandboxes started from programs with random descriptors and variables: inside there are only
those that the request names. Every failure names its seed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.inside import SOURCE

pytestmark = pytest.mark.slow

SEEDS = 200 if os.environ.get("BRANCHFS_SOAK") else 8
WRITABLE = {"/tmp", "/var/tmp", "/dev/shm", "/dev/pts", "/proc"}
INITIAL = {"LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCPATH"}
PROGRAM = """
import json, os, random, socket, sys, tempfile
sys.path.append(sys.argv[4])
from pathlib import Path
from support.inside import look
from branching import BranchContext, Workspace

root, said, chance = Path(sys.argv[1]), Path(sys.argv[2]), random.Random(int(sys.argv[3]))
facts = {}

KINDS = ["file", "written", "directory", "pipe", "pair", "server", "memory", "null"]
def something():
    kind = chance.choice(KINDS)
    if kind == "file": return [os.open("/etc/passwd", os.O_RDONLY)]
    if kind == "written": return [os.open(said.parent / "written", os.O_RDWR | os.O_CREAT)]
    if kind == "directory": return [os.open(chance.choice(["/", "/etc"]), os.O_RDONLY)]
    if kind == "pipe": return list(os.pipe())
    if kind == "pair": return [each.detach() for each in socket.socketpair()]
    if kind == "memory": return [os.memfd_create("caller")]
    if kind == "null": return [os.open("/dev/null", os.O_RDWR)]
    server = socket.socket(socket.AF_UNIX)
    server.bind("\\0random-" + str(os.getpid()) + str(chance.random()))
    server.listen()
    return [server.detach()]

def disturb():
    for _ in range(chance.randrange(12)):
        for number in something():
            if number > 2 and chance.random() < 0.5:
                wanted = chance.randrange(3, 120)
                try:
                    os.fstat(wanted)
                except OSError:
                    os.dup2(number, wanted)
                    os.close(number)
                    number = wanted
            if number > 2:
                os.set_inheritable(number, chance.random() < 0.5)

closed = [number for number in range(3) if chance.random() < 0.4]
moment = chance.choice(["before", "between"])
def close():
    for number in closed:
        os.close(number)

numbers = [chance.randrange(120) for _ in range(5)]  # in the closure: mean nothing
for _ in range(chance.randrange(5)):
    os.environ["RANDOM_%d" % chance.randrange(99)] = "secret-%d" % chance.randrange(10**9)
if moment == "before":
    close()
if chance.random() < 0.5: disturb()
space = Workspace(root)
sibling = space.branch("sibling", on_success=None).__enter__()
if moment == "between":
    close()
    space.branches()
options = {
    "clean_env": chance.random() < 0.5, "network": chance.random() < 0.5,
    "env": {"NAMED": "yes"}, "close_fds": chance.random() < 0.3,
}
command = chance.random() < 0.5
names_pipe = not command and not options["close_fds"] and chance.random() < 0.5
pipe = None
with space.branch("b", on_success=None) as branch:
    disturb()
    if names_pipe:
        reader, writer = os.pipe()
        pipe = os.fdopen(writer, "wb", 0)
        facts["pipe"] = os.readlink(f"/proc/self/fd/{writer}")
    def inside(path):
        return look(), len(numbers), pipe is not None
    if command:
        (branch.path / "look.py").write_text(Path(sys.argv[5]).read_text())
        out = []
        # The interpreter itself adds LC_CTYPE to an environment without a locale.
        words = [sys.executable, "-I", "-X", "utf8=0", "look.py"]
        with BranchContext(words, branch, stdout=out.append, **options) as context:
            context.wait(60)
        found = json.loads(b"".join(out))
    else:
        with BranchContext(inside, branch, **options) as context:
            context.wait(60)
        found = context.result.value[0]
    branch.abort()
sibling.abort()
space.close()
facts |= {"found": found, "command": command, "clean": options["clean_env"], "closed": closed}
facts["environment"] = dict(os.environ)
facts["standard"] = [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]
facts["mounts"] = look()["mounts"]
said.write_text(json.dumps(facts))
"""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_inside_there_is_only_what_the_request_names(real: Mounted, place: Path, seed: int) -> None:
    said = place / "said"
    words = [str(real.root), str(said), str(seed), str(SOURCE.parents[1]), str(SOURCE)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=100,
        env={**os.environ, "GIVEN": "secret-given"},
        check=False,
    )
    assert said.exists(), done.stderr
    facts: dict[str, Any] = json.loads(said.read_text())
    found = facts["found"]
    _check_descriptors(facts, found)
    _check_environment(facts, found)
    _check_mounts(facts, found, real)


def _check_descriptors(facts: dict[str, Any], found: dict[str, Any]) -> None:
    links = dict(found["descriptors"])
    for number in range(3):
        link = links.pop(str(number))
        if number in facts["closed"] and not (number == 1 and facts["command"]):
            assert link == "/dev/null"
        elif not (number == 1 and facts["command"]):
            assert link == facts["standard"][number]
    if "pipe" in facts:
        assert links.pop("3") == facts["pipe"]
    if not facts["command"]:
        results = [n for n, link in links.items() if link.startswith("/memfd:result")]
        assert len(results) == 1
        del links[results[0]]
    assert links == {}


def _check_environment(facts: dict[str, Any], found: dict[str, Any]) -> None:
    outside, inside = facts["environment"], found["environment"]
    own = {"NAMED", "BRANCHING", "BRANCHING_WORKSPACE", "PWD", "TMPDIR"}
    for name, value in inside.items():
        assert name in own or outside.get(name) == value, name
    assert own <= inside.keys()
    if facts["clean"]:
        assert "secret" not in json.dumps(inside)
    else:
        assert outside.keys() <= inside.keys()
    initial = {word.partition("=")[0] for word in found["initial environment"]}
    assert initial <= (inside.keys() if facts["command"] else INITIAL)


def _check_mounts(facts: dict[str, Any], found: dict[str, Any], real: Mounted) -> None:
    for point, access in found["mounts"].items():
        if access == "rw":
            assert point in WRITABLE or point == str(real.root) or point.startswith("/dev/"), point
        assert "sibling" not in point
    assert found["mounts"][str(real.root)] == "rw"
