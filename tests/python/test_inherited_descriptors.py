"""Descriptors and variables in a sandbox: those that the request names, and
nothing else that the calling program has.

Each program is one of its own, so that it can be started without standard streams, and close them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.inside import SOURCE

from branching import BranchContext, NamespaceError, Speculate, Workspace

SECRET = "only-the-caller-knows"
SUPPORT = SOURCE.parents[1]
PROLOGUE = f"""
import json, os, socket, stat, sys, time
sys.path.append({str(SUPPORT)!r})
from pathlib import Path
from branching import BestOfN, BranchContext, Speculate, Workspace
here, said = Path(sys.argv[1]), Path(sys.argv[2])
"""


def program(code: str, *words: object, redirect: str = "", **environment: str) -> None:
    """Runs a program, redirected as a shell would do it."""
    argv = [sys.executable, "-c", f"{PROLOGUE}\n{code}", *map(str, words)]
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"]


class TestClosedStandardDescriptors:
    """The next file that a program opens gets the number of the one that is closed."""

    ATTACK = """
import os, socket
asked = {"v": 1, "verb": "commit", "branch": "victim"}
def attack(_):
    links = {}
    for number in range(64):
        try:
            link = links[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if link.startswith("socket:"):
            os.write(number, (json.dumps(asked) + "\\n").encode())
            os.read(number, 4096)
    return json.dumps(links)
"""

    @pytest.mark.parametrize("redirect", CLOSED)
    @pytest.mark.parametrize("when", ["at the start", "later"])
    @pytest.mark.parametrize("what", ["a command", "a function", "a candidate"])
    def test_the_control_socket_does_not_take_their_place(
        self, real: Mounted, place: Path, redirect: str, when: str, what: str
    ) -> None:
        space = Workspace(real.root)
        victim = space.branch("victim", on_success=None).__enter__()
        (victim.path / "secret").write_text("x")
        numbers = [n for n, word in enumerate(("<&-", ">&-", "2>&-")) if word in redirect.split()]
        close = f"for n in {numbers}: os.close(n)\n" if when == "later" else ""
        inside = {
            "a command": f"""
(branch.path / "attack.py").write_text({"import json" + self.ATTACK!r} + "print(attack(None))")
found = []
with BranchContext(["python3", "attack.py"], branch, stdout=found.append, stderr=2) as context:
    context.wait(30)
said.write_bytes(b"".join(found))
""",
            "a function": """
with BranchContext(attack, branch) as context:
    context.wait(30)
    said.write_text(context.result.value)
""",
            "a candidate": """
[result] = BestOfN([attack], isolate_processes=True)(space).all_results
said.write_text(result.return_value)
""",
        }[what]
        code = f"""
{self.ATTACK}
{close}
space = Workspace(here)
space.branches()  # the connection is made
branch = None if {what == "a candidate"} else space.branch("attacker", on_success=None).__enter__()
try:
    exec({inside!r})
finally:
    if branch is not None: branch.abort()
"""
        said = place / "said"
        program(code, real.root, said, redirect="" if when == "later" else redirect)
        links = json.loads(said.read_text())
        assert not any(link.startswith("socket:") for link in links.values()), links
        for number in numbers:
            if what == "a command" and number == 1:
                continue  # our pipe
            if what == "a candidate" and number > 0:
                continue  # the pattern's pipe
            assert links[str(number)] == "/dev/null", links
        assert [record.name for record in space.branches()] == ["victim"]
        assert not (real.base / "secret").exists()
        victim.abort()
        space.close()

    def test_a_control_socket_that_is_passed_by_its_number_is_refused(
        self, real_workspace: Workspace
    ) -> None:
        path = os.fsdecode(os.getxattr(real_workspace.root, "user.branchfs.control"))
        with (
            socket.socket(socket.AF_UNIX) as line,
            real_workspace.branch("b", on_success=None) as branch,
        ):
            line.connect(path)
            with (
                pytest.raises(NamespaceError, match=r"control socket.*nothing ran"),
                BranchContext(["true"], branch, stdout=line.fileno()),
            ):
                pass
            branch.abort()


MODULE_VARIABLE: Any = None


class TestNumbers:
    """An integer is a number, whatever file has it here."""

    @pytest.mark.parametrize("is_inheritable", [False, True], ids=["private", "inheritable"])
    @pytest.mark.parametrize(
        "shape",
        [
            lambda n: n,
            lambda n: (n,),
            lambda n: [n, [n]],
            lambda n: {"key": n, n: "key"},
            lambda n: {n},
            lambda n: type("Holder", (), {"number": n, "fileno": n})(),
        ],
        ids=["integer", "tuple", "list", "dict", "set", "object"],
    )
    @pytest.mark.parametrize("where", ["closure", "default", "module variable"])
    def test_an_integer_passes_no_descriptor(
        self, tmp_path: Path, is_inheritable: bool, shape: Any, where: str
    ) -> None:
        global MODULE_VARIABLE  # noqa: PLW0603
        reader, writer = os.pipe()
        named = shape(writer)
        MODULE_VARIABLE = named

        def of_closure(path: Path) -> tuple[object, list[str]]:
            return named, os.listdir("/proc/self/fd")  # noqa: PTH208

        def of_default(path: Path, named: Any = named) -> tuple[object, list[str]]:
            return named, os.listdir("/proc/self/fd")  # noqa: PTH208

        def of_module(path: Path) -> tuple[object, list[str]]:
            return MODULE_VARIABLE, os.listdir("/proc/self/fd")  # noqa: PTH208

        targets = {"closure": of_closure, "default": of_default, "module variable": of_module}
        # At a number that no file of the sandbox's own takes.
        os.dup2(writer, 200, inheritable=is_inheritable)
        os.set_inheritable(writer, is_inheritable)
        try:
            with BranchContext(targets[where], tmp_path) as context:
                context.wait(60)
                value: Any = context.result.value
        finally:
            for number in (reader, writer, 200):
                os.close(number)
            MODULE_VARIABLE = None
        # The result's own file, and the directory that was listed.
        assert sorted(map(int, value[1])) == [0, 1, 2, 3, 4]

    def test_programs_that_a_function_starts_do_not_inherit_its_result(
        self, tmp_path: Path
    ) -> None:
        def inside(path: Path) -> str:
            words = ["/bin/ls", "/proc/self/fd"]
            return subprocess.check_output(words, text=True, close_fds=False)

        with BranchContext(inside, tmp_path, close_fds=True) as context:
            context.wait(60)
            value: Any = context.result.value
        # The last one is the directory that `ls` lists.
        assert sorted(map(int, value.split())) == [0, 1, 2, 3]

    def test_candidates_of_a_loop_hold_no_pipes_of_each_other(
        self, real_workspace: Workspace
    ) -> None:
        def make(index: int) -> Any:
            def candidate(path: Path) -> str:
                links = {}
                for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
                    try:
                        links[name] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
                    except OSError:
                        continue
                pipes = {link for link in links.values() if link.startswith("pipe:")}
                return f"{index} {len(pipes - {links['1'], links['2']})}"

            return candidate

        candidates = [make(index) for index in range(24)]
        outcome = Speculate(candidates, isolate_processes=True, first_wins=False)(real_workspace)
        said = [result.return_value for result in outcome.all_results]
        assert said == [f"{index} 0" for index in range(24)]


class TestEnvironment:
    CODE = """
from support.inside import count_in_memory, look
os.environ["SET_LATER"] = os.environ["GIVEN"][::-1]
def inside(path):
    return look(), count_in_memory(b"[o]nly-the-[c]aller-knows")
with BranchContext(inside, here, clean_env=CLEAN) as context:
    context.wait(30)
    value = context.result.value
said.write_text(json.dumps(value))
"""

    @pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "as outside"])
    def test_a_function_has_the_environment_that_was_asked_for_and_no_other(
        self, tmp_path: Path, place: Path, is_clean: bool
    ) -> None:
        said = place / "said"
        code = self.CODE.replace("CLEAN", str(is_clean))
        program(code, tmp_path, said, GIVEN=SECRET, TZ="Asia/Tokyo", LANG="C.UTF-8")
        found, count = json.loads(said.read_text())
        assert ("GIVEN" in found["environment"]) is not is_clean
        assert ("SET_LATER" in found["environment"]) is not is_clean
        names = {word.partition("=")[0] for word in found["initial environment"]}
        assert names <= {"LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "LD_PRELOAD", "LOCPATH"}
        assert (count == 0) is is_clean

    def test_a_function_sees_the_time_zone_that_was_asked_for(self, tmp_path: Path) -> None:
        def hour(path: Path) -> int:
            return time.localtime(0).tm_hour

        for zone, expected in (("Asia/Tokyo", 9), ("UTC", 0)):
            with BranchContext(hour, tmp_path, env={"TZ": zone}) as context:
                context.wait(60)
                assert context.result.value == expected


class TestBesideTheScript:
    """A script's own directory is on `sys.path`, and so is shown where it lies below /tmp."""

    CODE = """
from helper import WORD  # a module beside the script: it must be found
def look(path):
    import os
    found = {}
    for name in NAMES:
        try:
            found[name] = sorted(os.listdir(name))
        except OSError as error:
            found[name] = error.strerror
    import helper
    return found, helper.WORD
space = Workspace(here)
sibling = space.branch("sibling", on_success=None).__enter__()
(sibling.path / "secret").write_text("x")
with space.branch("b", on_success=None) as branch:
    with BranchContext(look, branch) as context:
        context.wait(30)
        value = context.result.value
    branch.abort()
sibling.abort()
space.close()
said.write_text(json.dumps(value))
"""

    @pytest.mark.parametrize("driver", ["fuse", "overlay"])
    @pytest.mark.parametrize("by", ["script", "PATH", "sys.path"])
    def test_base_and_store_are_hidden_in_a_directory_that_is_shown(
        self, place: Path, driver: str, by: str
    ) -> None:
        from support.branchfs import mounted

        project = place / "project"
        project.mkdir()
        (project / "helper.py").write_text("WORD = 'found'\n")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(project / "socket"))
            listener.listen()
            base, root = project / "base", project / "mount"
            base.mkdir()
            (base / "seed").write_text("x")
            names = [str(path) for path in (project, base, base / ".branching", root)]
            code = PROLOGUE + self.CODE.replace("NAMES", repr(names))
            script = (project if by == "script" else place) / "program.py"
            script.write_text(code)
            environment = {"PYTHONDONTWRITEBYTECODE": "1"}
            if by != "script":
                environment["PYTHONPATH"] = str(project)
            if by == "PATH":
                environment["PATH"] = f"{project}:{os.environ['PATH']}"
            with mounted(base, root, driver=driver):
                done = subprocess.run(
                    [sys.executable, str(script), str(root), str(place / "said")],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    env={**os.environ, **environment},
                    check=False,
                )
        assert done.returncode == 0, done.stderr
        found, word = json.loads((place / "said").read_text())
        assert word == "found"
        assert "helper.py" in found[str(project)]
        assert found[str(base)] == []
        assert found[str(base / ".branching")] == "No such file or directory"
        assert found[str(root)] == ["seed"]

    def test_a_link_in_the_branch_does_not_show_the_store(
        self, real: Mounted, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Paths of the base that the program needs are shown with the branch's content."""
        tools = real.base / "tools"
        tools.mkdir()
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        with Workspace(real.root) as space, space.branch("b", on_success=None) as branch:
            (branch.path / "tools").rmdir()
            (branch.path / "tools").symlink_to(real.base / ".branching")
            out: list[bytes] = []
            command = ["sh", "-c", f"ls '{tools}'; ls '{real.base}'; echo done"]
            with BranchContext(command, branch, stdout=out.append, stderr=out.append) as context:
                context.wait(30)
            branch.abort()
        assert b"done" in b"".join(out)
        assert b"layers" not in b"".join(out)
