"""BranchContext: functions and commands in processes of their own."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from decimal import Decimal
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from conftest import Mounted
from support.branchfs import mounted

import branching
from branching import (
    BranchContext,
    BranchingError,
    ForkError,
    NamespaceError,
    ProcessBranchError,
    ResourceLimits,
    Workspace,
)

MIB = 1 << 20
LONG = 300.0
"""Seconds that nobody waits: what sleeps so long is ended."""

counter = 5


class Mine(Exception):
    """Takes other arguments than it passes on, as many exceptions do."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclasses.dataclass
class Point:
    x: int
    y: list[int] = dataclasses.field(default_factory=list)

    def total(self) -> int:
        return self.x + sum(self.y)


class Colour(enum.Enum):
    RED = 1
    GREEN = 2

    @property
    def shout(self) -> str:
        return self.name + "!"


def value_of(target: Any, workspace: Any, **options: Any) -> Any:
    """Runs the target to its end and returns what came back."""
    with BranchContext(target, workspace, **options) as context:
        context.wait()
        return context.result.value


def failure_of(target: Any, workspace: Path, **options: Any) -> ProcessBranchError:
    """Runs a target that has to fail; returns what wait() raised."""
    with BranchContext(target, workspace, **options) as context:
        with pytest.raises(ProcessBranchError) as caught:
            context.wait()
        return caught.value


class TestPublishedBehaviour:
    @pytest.mark.contract("3.3", "3.4")
    def test_returning_is_success(self, place: Path) -> None:
        def target(path: Path) -> None:
            (path / "made").write_text("x")

        with BranchContext(target, place) as context:
            context.wait()
            assert not context.alive
        assert (place / "made").read_text() == "x"
        assert (context.result.ended, context.result.exit_code) == ("exit", 0)

    @pytest.mark.contract("3.3", "3.8")
    def test_raising_is_failure_and_comes_home_typed(self, place: Path) -> None:
        def target(path: Path) -> None:
            raise Mine("text", 7)

        error = failure_of(target, place)
        assert isinstance(error.__cause__, Mine)
        assert (error.__cause__.args, error.__cause__.code) == (("text",), 7)
        assert "in target" in str(error.__cause__.__cause__)

    @pytest.mark.contract("3.3")
    @pytest.mark.parametrize(("asked", "code"), [(3, 3), (None, 0), ("text", 1), (256, 0)])
    def test_system_exit_sets_the_exit_code(self, place: Path, asked: Any, code: int) -> None:
        with BranchContext(lambda path: sys.exit(asked), place) as context:
            try:
                context.wait()
            except ProcessBranchError:
                assert code
            assert context.result.exit_code == code

    @pytest.mark.contract("3.7")
    def test_before_the_start_it_has_no_pid(self, place: Path) -> None:
        context = BranchContext(print, place)
        with pytest.raises(ProcessBranchError, match="Process not started"):
            _ = context.pid
        assert not context.alive
        context.abort()

    @pytest.mark.contract("3.7")
    def test_the_pid_is_the_targets(self, place: Path) -> None:
        with BranchContext(lambda path: time.sleep(LONG), place) as context:
            assert context.alive
            os.kill(context.pid, signal.SIGKILL)
            with pytest.raises(ProcessBranchError, match="SIGKILL"):
                context.wait()
            assert (context.result.ended, context.result.exit_code) == ("signal", 137)

    @pytest.mark.contract("3.7")
    @pytest.mark.parametrize("limits", [None, ResourceLimits(pids=100)])
    def test_the_pid_of_a_command_is_the_commands_though_it_ends_at_once(
        self, place: Path, limits: ResourceLimits | None
    ) -> None:
        command = ["sh", "-c", 'echo "$$ $1" >>told', "sh"]
        pids = []
        for number in range(20):
            context = BranchContext([*command, str(number)], place, isolation="none", limits=limits)
            with context:
                context.wait()
                pids.append(f"{context.pid} {number}")
        assert (place / "told").read_text().splitlines() == pids

    @pytest.mark.parametrize("isolation", ["sandbox", "none"])
    def test_a_program_is_looked_for_as_execvp_does(self, place: Path, isolation: Any) -> None:
        """The first executable one; the error names a non-executable one before a missing one."""
        for name, mode, text in (
            ("a", 0o644, "#!/bin/sh\nexit 1"),
            ("b", 0o755, "#!/bin/sh\nexit 7"),
        ):
            (place / name).mkdir()
            (place / name / "tool").write_text(text)
            (place / name / "tool").chmod(mode)
        path = f"{place}/none:{place}/a/tool:{place}/a"

        def tool(places: str) -> BranchContext:
            return BranchContext(["tool"], place, isolation=isolation, env={"PATH": places})

        with tool(f"{path}:{place}/b") as context, suppress(ProcessBranchError):
            context.wait()
        assert context.result.exit_code == 7
        for places, reason in ((f"{place}/none:{place}/a/tool", "No such file"), (path, "Perm")):
            with pytest.raises(ProcessBranchError, match=f"{reason}.*nothing ran"), tool(places):
                pass

    @pytest.mark.contract("3.8")
    def test_wait_can_time_out_and_be_repeated(self, place: Path) -> None:
        with BranchContext(lambda path: time.sleep(LONG), place) as context:
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    context.wait(timeout=0.05)
            assert context.alive
            context.abort()
            for _ in range(2):
                with pytest.raises(ProcessBranchError):
                    context.wait()
            assert context.result.ended == "cancelled"

    @pytest.mark.contract("3.9")
    def test_abort_lets_it_tidy_up_first(self, place: Path) -> None:
        """SIGTERM, then SIGKILL."""
        with BranchContext(["sh", "-c", "trap 'touch bye; exit' TERM; touch up; sleep 300 & wait"],
                           place) as context:  # fmt: skip
            await_file(place / "up")
            context.abort()
        assert (place / "bye").exists()

    @pytest.mark.contract("3.9")
    def test_abort_kills_a_target_that_ignores_sigterm(self, place: Path) -> None:
        def target(path: Path) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (path / "up").touch()
            time.sleep(LONG)

        with BranchContext(target, place) as context:
            await_file(place / "up")
            context.abort(timeout=0.1)
            assert not context.alive
            assert context.result.exit_code == 137
            context.abort()

    @pytest.mark.contract("3.4")
    def test_leaving_the_with_ends_it(self, place: Path) -> None:
        with BranchContext(lambda path: time.sleep(LONG), place) as context:
            pid = context.pid
        assert not Path(f"/proc/{pid}").exists()

    def test_an_exception_inside_the_with_propagates(self, place: Path) -> None:
        with pytest.raises(LookupError), BranchContext(lambda path: time.sleep(LONG), place):
            raise LookupError

    @pytest.mark.contract("3.10")
    def test_create_starts_one_for_each(self, place: Path) -> None:
        places = [place / name for name in "ab"]
        for each in places:
            each.mkdir()
        targets = [lambda path, n=n: (path / "made").write_text(n) for n in "ab"]
        with BranchContext.create(targets, places, close_fds=True) as contexts:
            for context in contexts:
                context.wait()
        assert [(each / "made").read_text() for each in places] == ["a", "b"]
        with BranchContext.create([lambda path: time.sleep(LONG)] * 2, places) as contexts:
            assert all(context.alive for context in contexts)
        assert not any(context.alive for context in contexts)

    @pytest.mark.contract("3.10")
    def test_as_many_workspaces_as_targets(self, place: Path) -> None:
        with pytest.raises(ValueError, match="same length"):
            BranchContext.create([print], []).__enter__()

    @pytest.mark.contract("3.6")
    def test_a_workspace_that_is_not_there_is_an_error(self, place: Path) -> None:
        with pytest.raises(NamespaceError, match="nothing ran"), BranchContext(print, place / "x"):
            pass

    @pytest.mark.contract("3.1", "3.2", "3.17")
    def test_the_published_options_are_taken(self, place: Path) -> None:
        limits = ResourceLimits()
        with BranchContext(
            print, place, isolate=True, close_fds=True, limits=limits, parent_cgroup=None
        ) as context:
            context.wait()
            assert context.cgroup_scope is None

    @pytest.mark.parametrize("target", ["true", [], None])
    def test_a_target_is_a_function_or_a_list_of_words(self, place: Path, target: Any) -> None:
        with pytest.raises(TypeError):
            BranchContext(target, place)

    def test_it_serves_one_with(self, place: Path) -> None:
        context = BranchContext(print, place)
        with context:
            pass
        with pytest.raises(ProcessBranchError, match="before"), context:
            pass

    def test_a_command_that_is_not_there_is_named(self, place: Path) -> None:
        with (
            pytest.raises(ProcessBranchError, match="no-such-program cannot be executed"),
            BranchContext(["no-such-program"], place),
        ):
            pass


class TestInABranch:
    @pytest.mark.contract("3.5")
    def test_the_target_is_given_the_workspaces_path(self, real: Mounted) -> None:
        """Design 7; a Branch serves as well as its path."""
        space = Workspace(real.root)
        with space.branch("b") as branch:
            assert value_of(lambda path: (path, Path.cwd()), branch.path) == (real.root,) * 2
            assert value_of(lambda path: (path / "seed.txt").read_text(), branch) == "seed\n"
            value_of(lambda path: (path / "made").write_text("x"), branch)
        assert (real.base / "made").read_text() == "x"
        space.close()

    @pytest.mark.contract("3.5")
    @pytest.mark.parametrize("has_others", [False, True], ids=["alone", "beside root's mount"])
    def test_root_is_not_needed(
        self, place: Path, as_user: tuple[int, int], *, has_others: bool
    ) -> None:
        """Unprivileged user namespaces suffice, also if root has a mount in a private directory.
        Uses the system's interpreter and a copy of the library, because other users may have no
        access to a checkout."""
        package = Path(branching.__file__).parent
        shutil.copytree(package, place / "branching", ignore=shutil.ignore_patterns("__pycache__"))
        work = place / "work"
        work.mkdir()
        os.chown(work, *as_user)
        script = (
            "import os, sys\n"
            "from branching import BranchContext\n"
            "def target(path):\n"
            "    (path / 'made').write_text('x')\n"
            "    return os.getuid(), os.getpid()\n"
            "with BranchContext(target, sys.argv[1]) as context:\n"
            "    context.wait()\n"
            "    print(*context.result.value)\n"
        )
        uid, gid = as_user
        with ExitStack() as stack:
            if has_others:  # nowhere in /tmp, which is covered as a whole
                private = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/")))
                stack.enter_context(mounted(private / "base", private / "mount"))
            done = subprocess.run(
                [
                    *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"),
                    *(interpreter_of_everybody(), "-c", script, str(work)),
                ],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(place),
                    "PYTHONPYCACHEPREFIX": "/",
                },
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0, done.stderr
        seen_uid, seen_pid = done.stdout.split()
        assert int(seen_uid) == uid
        assert int(seen_pid) < 100, "it has a process namespace of its own"
        assert (work / "made").stat().st_uid == uid

    def test_base_and_siblings_are_out_of_reach(self, real: Mounted) -> None:
        space = Workspace(real.root)
        base, root = real.base, real.root

        def look(path: Path) -> list[bool]:
            places = [base / "seed.txt", root / "@sibling", base / ".branching"]
            return [place.exists() for place in places]

        with space.branch("sibling", on_success=None) as sibling:
            (sibling.path / "secret").write_text("x")
            with space.branch("b", on_success=None) as branch:
                assert value_of(look, branch) == [False, False, False]
                branch.abort()
            sibling.abort()
        space.close()


class TestWhatReachesIt:
    @pytest.mark.contract("4.26")
    def test_closures_and_variables_as_they_are_now(self, place: Path) -> None:
        """The target sees them as they are at the fork."""
        global counter  # noqa: PLW0603
        counter = 6
        names = ["a"]

        def inner(text: str) -> str:
            return f"{text} {counter} {names}"

        names.append("b")
        assert value_of(lambda path: inner("x"), place) == "x 6 ['a', 'b']"

    @pytest.mark.contract("0.4")
    def test_changes_of_the_targets_memory_stay_in_the_child(self, place: Path) -> None:
        names: list[str] = []
        value_of(lambda path: names.append("x"), place)
        assert names == []

    def test_recursion_classes_and_locks(self, place: Path) -> None:
        lock = threading.Lock()

        class Local:
            def __init__(self) -> None:
                self.lock = threading.RLock()

            def depth(self, n: int) -> int:
                with self.lock:
                    return 0 if n == 0 else 1 + self.depth(n - 1)

        class Below(Local):
            def depth(self, n: int) -> int:
                return super().depth(n) * 10

        local = Below()

        def target(path: Path) -> Any:
            with lock:
                point = Point(1, [2])
                return local.depth(1), point.total(), Colour.RED.shout, isinstance(local, Local)

        with lock:
            assert value_of(target, place) == (10, 3, "RED!", True)

    @pytest.mark.contract("3.11")
    def test_the_error_names_a_variable_that_cannot_be_copied(self, place: Path) -> None:
        stream = (n for n in range(3))
        with (
            pytest.raises(ForkError, match=r"its variable 'stream'.*nothing ran"),
            BranchContext(lambda path: list(stream), place),
        ):
            pass

    @pytest.mark.contract("3.1")
    @pytest.mark.parametrize(
        ("mode", "buffering"), [("wb", 0), ("wb", -1), ("w", 1)], ids=["raw", "buffered", "text"]
    )
    def test_a_file_object_over_a_pipe_is_passed_on_unless_closed(
        self, place: Path, mode: str, buffering: int
    ) -> None:
        reader, writer = os.pipe()
        with FileIO(reader) as ours, os.fdopen(writer, mode, buffering) as pipe:
            word = b"word" if "b" in mode else "wörd"

            def write(path: Path) -> None:
                pipe.write(word)
                pipe.flush()

            value_of(write, place)
            assert ours.read(9) == (word if isinstance(word, bytes) else word.encode())
            with (
                pytest.raises(ForkError, match=r"its variable 'pipe'.*nothing ran"),
                BranchContext(write, place, close_fds=True),
            ):
                pass

    def test_a_file_object_over_a_pipe_can_be_read(self, place: Path) -> None:
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb") as pipe, FileIO(writer, "wb") as ours:
            ours.write(b"word")
            ours.close()
            assert value_of(lambda path: pipe.read(), place) == b"word"

    def test_of_open_files_only_pipes_can_be_sent(self, place: Path) -> None:
        with (
            Path("/etc/hostname").open() as file,
            pytest.raises(ForkError, match=r"its variable 'file'.*is not a pipe.*nothing ran"),
            BranchContext(lambda path: file.read(), place),
        ):
            pass

    def test_environment(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("API_KEY", "secret")

        def target(path: Path) -> list[str | None]:
            return [os.environ.get(name) for name in ("API_KEY", "MORE", "BRANCHING", "TMPDIR")]

        assert value_of(target, place) == ["secret", None, "1", "/tmp"]
        found = value_of(target, place, clean_env=True, env={"MORE": "x"})
        assert found == [None, "x", "1", "/tmp"]
        out: list[bytes] = []
        command = ["sh", "-c", "echo $API_KEY$MORE"]
        value_of(command, place, clean_env=True, env={"MORE": "x"}, stdout=out.append)
        assert b"".join(out) == b"x\n"


class TestWhatComesHome:
    @pytest.mark.contract("4.32")
    @pytest.mark.parametrize(
        "value",
        [
            None,
            (1, [2.5, {"a": {3}}], b"x", "é", True, 1j, frozenset({1})),
            datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
            Decimal("1.5"),
            Path("/x"),
            Point(1, [2]),
            Colour.GREEN,
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_values_come_back_as_they_are(self, place: Path, value: object) -> None:
        found = value_of(lambda path: value, place)
        assert (found, type(found)) == (value, type(value))

    def test_local_classes_come_home_as_themselves(self, place: Path) -> None:
        class Local(Exception):
            pass

        class Thing:
            def __init__(self, name: str) -> None:
                self.name = name

        def target(path: Path) -> None:
            raise Local("x")

        assert isinstance(failure_of(target, place).__cause__, Local)
        found = value_of(lambda path: Thing("x"), place)
        assert type(found) is Thing
        assert found.name == "x"

    @pytest.mark.contract("4.32")
    def test_any_size(self, place: Path) -> None:
        """A result that is larger than a pipe."""
        with BranchContext(lambda path: b"x" * (10 * MIB), place) as context:
            while context.alive:
                time.sleep(0.01)
            assert context.result.value == b"x" * (10 * MIB)

    def test_a_value_that_cannot_be_sent_arrives_as_text(self, place: Path) -> None:
        error = failure_of(lambda path: (n for n in range(3)), place)
        assert "generator" in str(error.__cause__)

        class Odd(Exception):
            pass

        def target(path: Path) -> None:
            odd = Odd("words")
            odd.thing = (n for n in range(3))  # type: ignore[attr-defined]
            raise odd

        error = failure_of(target, place)
        assert "Odd: words" in str(error.__cause__)
        assert error.__cause__ is not None
        assert "in target" in str(error.__cause__.__cause__)

    def test_decoding_a_result_runs_no_code(self, place: Path, tmp_path: Path) -> None:
        """Bytes from a sandbox must not become code outside of it."""
        mark = str(tmp_path / "escaped")

        class Evil:
            def __reduce__(self) -> Any:
                return os.system, (f"touch {mark}",)

        class Worse:
            def __reduce__(self) -> Any:
                return subprocess.Popen, (["touch", mark],)

        class Worst(Exception):
            def __reduce__(self) -> Any:
                return eval, (f"open({mark!r}, 'w')",)

        for kind in (Evil, Worse):
            error = failure_of(lambda path, kind=kind: kind(), place)
            assert "not accepted" in str(error)

        def target(path: Path) -> None:
            raise Worst

        failure_of(target, place)
        assert not Path(mark).exists()

    def test_classes_of_packages_come_home_when_they_are_named(self, place: Path) -> None:
        found = failure_of(lambda path: threading.local, place)
        assert "not accepted" in str(found)
        import argparse

        def target(path: Path) -> argparse.Namespace:
            return argparse.Namespace(x=1)

        assert "not accepted" in str(failure_of(target, place))
        assert value_of(target, place, accept=[argparse.Namespace]).x == 1

    def test_outputs_can_be_heard(self, place: Path) -> None:
        """Also the output of a target that crashes."""
        out: list[bytes] = []
        err: list[bytes] = []

        def target(path: Path) -> None:
            print("out")
            print("err", file=sys.stderr)
            os.write(1, b"x" * MIB)
            sys.stdout.flush()
            os.abort()

        failure_of(target, place, stdout=out.append, stderr=err.append)
        assert b"".join(out).count(b"x") == MIB
        assert b"err\n" in b"".join(err)


class TestLimits:
    @pytest.mark.contract("3.14", "3.15")
    def test_memory(self, place: Path) -> None:
        """The published package lets this pass."""

        def target(path: Path) -> int:
            return len(bytearray(200 * MIB))

        with BranchContext(target, place, limits=ResourceLimits(memory=64 * MIB)) as context:
            assert context.cgroup_scope is not None
            with pytest.raises(ProcessBranchError, match="out of memory"):
                context.wait()
            result = context.result
        assert (result.ended, result.exit_code) == ("oom", 137)
        assert result.memory_peak is not None
        assert 60 * MIB < result.memory_peak <= 64 * MIB

    def test_wall_time(self, place: Path) -> None:
        """Also when its end is not awaited."""
        limits = ResourceLimits(wall_time=0.3)
        with BranchContext(lambda path: time.sleep(LONG), place, limits=limits) as context:
            await_that(lambda: not context.alive)
            assert context.result.ended == "timeout"
            assert context.result.wall_seconds >= 0.3

    def test_processes(self, place: Path) -> None:
        def target(path: Path) -> None:
            for _ in range(50):
                if os.fork() == 0:
                    time.sleep(LONG)

        with BranchContext(target, place, limits=ResourceLimits(pids=10)) as context:
            with pytest.raises(ProcessBranchError, match="too many processes"):
                context.wait()
            assert context.result.ended == "pids"

    def test_usage_is_reported(self, place: Path) -> None:
        def target(path: Path) -> None:
            held = bytearray(50 * MIB)
            end = time.process_time() + 0.2
            while time.process_time() < end:
                held[0] = 1

        with BranchContext(target, place) as context:
            context.wait()
            result = context.result
        assert result.memory_peak is not None
        assert result.memory_peak > 50 * MIB
        assert result.cpu_seconds is not None
        assert 0.2 <= result.cpu_seconds < 20
        assert result.wall_seconds >= 0.2

    def test_usage_of_children_counts_also_if_the_target_succeeds(self, place: Path) -> None:
        def target(path: Path) -> None:
            ready, hold = os.pipe(), os.pipe()
            for _ in range(2):
                if os.fork() == 0:
                    os.close(hold[1])
                    held = bytearray(b"x") * (60 * MIB)
                    os.write(ready[1], held[:1])
                    os.read(hold[0], 1)  # until both hold their memory
                    os._exit(0)
            for _ in range(2):
                assert os.read(ready[0], 1)
            os.close(hold[1])
            assert [os.wait()[1] for _ in range(2)] == [0, 0]

        with BranchContext(target, place, limits=ResourceLimits(memory=512 * MIB)) as context:
            context.wait()
            result = context.result
        assert result.memory_peak is not None
        assert result.memory_peak > 120 * MIB

    def test_a_limit_that_cannot_be_enforced_is_an_error_before_anything_runs(
        self, place: Path
    ) -> None:
        with (
            pytest.raises(ProcessBranchError, match=r"limit on disk.*nothing was started"),
            BranchContext(lambda path: (path / "x").touch(), place, limits=ResourceLimits(disk=1)),
        ):
            pass
        assert list(place.iterdir()) == []


class TestWithoutASandbox:
    def test_it_works_in_the_directory_itself(self, place: Path) -> None:
        """Only if the caller asks for it."""
        own = Path("/proc/self/ns/mnt")
        found = value_of(lambda path: (path, own.readlink()), place, isolation="none")
        assert found == (place, own.readlink())

    def test_its_descendants_end_with_it(self, place: Path) -> None:
        script = "setsid sh -c 'echo $$ > pid; sleep 300' & while ! test -s pid; do :; done"
        with BranchContext(["sh", "-c", script], place, isolation="none") as context:
            context.wait()
        pid = int((place / "pid").read_text())
        await_that(lambda: not Path(f"/proc/{pid}").exists())

    def test_anything_else_is_no_isolation(self, place: Path) -> None:
        with pytest.raises(ValueError, match="isolation"):
            BranchContext(print, place, isolation="some")  # type: ignore[arg-type]


def test_under_a_program_with_many_threads(place: Path) -> None:
    """The threads fork, log and lock all the time; the new process has one thread and runs."""
    import logging

    stop = threading.Event()
    lock = threading.Lock()

    def noise() -> None:
        while not stop.is_set():
            with lock:
                logging.getLogger("noise").debug("x")
                time.sleep(0.0001)

    def target(path: Path) -> int:
        with lock:
            logging.getLogger("noise").debug("y")
            return threading.active_count()

    threads = [threading.Thread(target=noise) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert [value_of(target, place) for _ in range(20)] == [1] * 20
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_from_a_forked_child_and_after_it(place: Path) -> None:
    value_of(print, place)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if value_of(lambda path: 5, place) == 5 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert value_of(lambda path: 6, place) == 6


def test_all_errors_are_of_the_tree(place: Path) -> None:
    assert issubclass(ForkError, ProcessBranchError)
    assert issubclass(NamespaceError, ProcessBranchError)
    assert issubclass(ProcessBranchError, BranchingError)


def interpreter_of_everybody() -> str:
    """A Python that an ordinary user can execute: that of the tests may be in root's home."""
    for found in (Path(sys.executable).resolve(), Path("/usr/bin/python3").resolve()):
        if all(place.stat().st_mode & stat.S_IXOTH for place in (found, *found.parents)):
            return str(found)
    raise AssertionError("there is no python3 that an ordinary user could execute")


def await_file(path: Path) -> None:
    await_that(path.exists)


def await_that(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("seconds", [3_000_000.0, 1e300])
def test_a_wait_longer_than_the_kernel_can_count(tmp_path: Path, seconds: float) -> None:
    """More than 24.8 days are more milliseconds than 31 bits."""
    limits = ResourceLimits(wall_time=seconds)
    with BranchContext(["sh", "-c", "sleep 0.1"], tmp_path, limits=limits) as context:
        context.wait(timeout=seconds)
        assert context.result is not None
        assert context.result.how == "exit"


def test_a_wait_without_end(tmp_path: Path) -> None:
    with BranchContext(["sleep", "0.1"], tmp_path) as context:
        context.wait(timeout=math.inf)
