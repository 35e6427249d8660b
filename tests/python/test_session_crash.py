"""Sessions whose processes are killed (SIGKILL) at each step of a fork and of a pick.

| process | its steps | killed before each |
|---|---|---|
| session, child | check, park, fork, copying the mount table, unpark: each call that Python makes | call (`TRACER`; slow) |
| mount helper | entering a mount table, detaching, attaching, hiding, killing, answering | system call |
| init | waking up, waiting for those who have ended; none in a fork | system call |
| caller | messages to the other processes, branches of BranchFS, then a commit | third step |
| | the same | system call (slow) |

The system calls are those that others can notice (`support.system_calls`). Each process, but for the
caller, is also killed before each step of the caller: there the other processes wait (`Killer`).

With BRANCHFS_SOAK all of this is done with both drivers, and the caller is killed before each of its
steps and system calls. Without it, only the slow tests use both, and the caller is killed before
each third step and each sixth system call.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.branchfs import mounted
from support.system_calls import IS_KNOWN, KilledAtStep, name_of
from support.traces import processes_in_namespace
from support.waiting import until

from branching import Branch, BranchingError, MemoryBranchError, Session, Workspace
from branching.session.branch_mounts import BranchMounts
from branching.session.interpreter import Interpreter

STEPS = ((Interpreter, "ask"), (Interpreter, "await_here"), (BranchMounts, "_ask"))
BRANCH_STEPS = ("__enter__", "commit", "abort")
STEPS_MAX = 60
IS_SOAK = bool(os.environ.get("BRANCHFS_SOAK"))


DRIVERS = ("fuse", "overlay")


@pytest.fixture(params=DRIVERS)
def workspace(request: pytest.FixtureRequest, outside: Path) -> Iterator[Workspace]:
    yield from opened(outside, request.param)


@pytest.fixture(params=DRIVERS if IS_SOAK else DRIVERS[:1])
def swept(request: pytest.FixtureRequest, outside: Path) -> Iterator[Workspace]:
    """A workspace for the tests that are quick enough to run always, with one driver."""
    yield from opened(outside, request.param)


def opened(place: Path, driver: str) -> Iterator[Workspace]:
    base = place / "base"
    base.mkdir()
    (base / "seed.txt").write_text("seed\n")
    with mounted(base, place / "mount", driver=driver) as root, Workspace(root) as made:
        yield made

    def is_removed() -> bool:  # the daemon removes layers beside us
        shutil.rmtree(base, ignore_errors=True)
        return not base.exists()

    until(is_removed, "the base is removed")


class Killer:
    """Counts the steps of a session, and kills a process before one of them."""

    def __init__(self, at: int, pid: Callable[[], int]) -> None:
        self.count = 0
        self._at = at
        self._pid = pid

    def step(self) -> None:
        if self.count == self._at:
            os.kill(self._pid(), signal.SIGKILL)
        self.count += 1


@contextmanager
def watched(killer: Killer) -> Iterator[None]:
    """Calls the killer before each message to a process, and each change of a branch."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (*STEPS, *((Branch, name) for name in BRANCH_STEPS)):
            original = getattr(owner, name)

            def call(
                *words: object, original: Callable[..., object] = original, **options: object
            ) -> object:
                killer.step()
                return original(*words, **options)

            patch.setattr(owner, name, call)
        yield


def files(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir() if path.name != ".branching")


def namespace(session: Session) -> str:
    value = session.run("import os; os.readlink('/proc/self/ns/pid')").result()
    assert isinstance(value, str)
    return value


def test_a_session_that_is_killed_at_any_step_of_a_fork_leaves_nothing(
    swept: Workspace,
) -> None:
    for at in range(STEPS_MAX):
        with Session(swept) as session:
            space = namespace(session)
            session.run("open('made', 'w').close()")
            killer = Killer(at, lambda: session.pid)
            with watched(killer):
                try:
                    children = session.fork(2)
                except BranchingError:
                    children = []
            if children:  # it was killed afterwards, or they can go on without it
                children[0].run("x = 1")
                session.pick(children[0])
                assert session.run("x").result() == 1
            inside = set(processes_in_namespace(space))
            session.abort()
        # A new namespace may have the number of one that is gone.
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert swept.branches() == []
        if killer.count <= at:
            break
    assert 10 < killer.count == at
    assert files(swept.base) == ["seed.txt"]


@pytest.mark.parametrize("who", ["the winner", "the loser", "the session"])
def test_a_process_that_is_killed_at_any_step_of_a_pick_leaves_a_session_that_continues(
    swept: Workspace, who: str
) -> None:
    for at in range(STEPS_MAX):
        with Session(swept) as session:
            space = namespace(session)
            session.run("x = 0")
            children = session.fork(2)
            for child in children:
                child.run(f"x = {child.index + 1}; open('made', 'w').write('{child.index}')")
            pids = {
                "the winner": children[0].pid,
                "the loser": children[1].pid,
                "the session": session.pid,
            }
            killer = Killer(at, lambda: pids[who])  # noqa: B023
            with watched(killer), pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "kill", tolerant(os.kill))
                try:
                    session.pick(children[0])
                    is_picked = True
                except BranchingError:
                    is_picked = False
            if who != "the winner":
                assert is_picked
                assert session.run("x, open('made').read()").result() == (1, "0")
            elif not is_picked and session.is_forked and at % 2:
                session.none()
                assert session.run("x").result() == 0
            elif not is_picked and session.is_forked:
                session.pick(children[1])
                assert session.run("x, open('made').read()").result() == (2, "1")
            inside = set(processes_in_namespace(space))
            session.abort()
        # A new namespace may have the number of one that is gone.
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert swept.branches() == []
        if killer.count <= at:
            break
    assert 6 < killer.count == at
    assert files(swept.base) == ["seed.txt"]


def tolerant(kill: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def call(pid: int, number: int) -> None:
        try:
            kill(pid, number)
        except ProcessLookupError:
            pass  # the pick has killed it already

    return call


# System calls of the interpreters. The profiler of Python sees each call of a function in C before it
# is made, and a forked child inherits it.

TRACER = """
import os, socket, sys
NAMES = ("/session/worker.py", "/session/parking.py", "/_linux/fd_passing.py")
MODULES = ("posix", "fcntl", "socket", "select")
count, forks, number, is_armed = 0, 0, None, False

def profile(frame, event, called):
    global count, is_armed
    code = frame.f_code
    is_armed = is_armed or code.co_name == "_check"  # the first request of a fork, and of a pick
    if event == "call":
        is_step = code.co_filename.endswith("/_linux/syscalls.py")
    else:
        is_step = (
            event == "c_call" and code.co_filename.endswith(NAMES)
            and (called.__module__ in MODULES or isinstance(called.__self__, socket.socket))
        )
    if is_armed and is_step and number == WHO:
        if count == AT:
            os.kill(os.getpid(), 9)
        count += 1

def in_parent():
    global forks
    forks += 1

def in_child():
    global number
    number = forks

os.register_at_fork(after_in_parent=in_parent, after_in_child=in_child)
"""
SYSTEM_CALLS_MAX = 400


def traced(who: int | None, at: int) -> str:
    return f"WHO, AT = {who}, {at}\n{TRACER}\nsys.setprofile(profile)"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", [None, 0, 1], ids=["the session", "child 0", "child 1"])
def test_an_interpreter_that_is_killed_at_any_system_call_of_a_fork(
    workspace: Workspace, who: int | None
) -> None:
    for at in range(SYSTEM_CALLS_MAX):
        with Session(workspace) as session:
            space = namespace(session)
            session.run("log = open('log', 'a'); log.write('.'); log.flush(); x = 1")
            session.run(traced(who, at)).result()
            is_dead, pid = False, session.pid
            try:
                children = session.fork(2)
            except MemoryBranchError:
                is_dead, children = True, []
            if who is not None and is_dead:  # the session has lost nothing
                assert session.run("x, open('log').read()").result() == (1, ".")
            ended = Path(f"/proc/{pid}/stat")
            is_dead = is_dead or not ended.exists() or " Z " in ended.read_text()
            for child in children:
                if child.is_alive:
                    with suppress(MemoryBranchError):  # it dies at the next call
                        child.run("x += 1; log.write('.'); log.flush()")
            left = [child for child in children if child.is_alive]
            if left:
                with suppress(MemoryBranchError):
                    session.pick(left[-1])
            inside = set(processes_in_namespace(space))
            session.abort()
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert workspace.branches() == []
        assert files(workspace.base) == ["seed.txt"]
        if len(left) == 2 and not is_dead:
            break
    assert 8 < at < SYSTEM_CALLS_MAX - 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_winner_that_is_killed_at_any_system_call_of_a_pick(workspace: Workspace) -> None:
    for at in range(SYSTEM_CALLS_MAX):
        with Session(workspace) as session:
            space = namespace(session)
            session.run("log = open('log', 'a'); log.write('.'); log.flush(); x = 1")
            children = session.fork(2)
            for child in children:
                child.run(f"x = 2 + {child.index}; log.write('{child.index}'); log.flush()")
            children[0].run(traced(None, at)).result()
            is_picked = True
            try:
                session.pick(children[0])
                state = session.run("x, open('log').read()").result()
            except MemoryBranchError:
                is_picked = False
            if is_picked:
                assert state == (2, ".0")
            elif session.is_forked:
                session.pick(children[1])
                assert session.run("x, open('log').read()").result() == (3, ".1")
            inside = set(processes_in_namespace(space))
            session.abort()
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert workspace.branches() == []
        assert files(workspace.base) == ["seed.txt"]
        if is_picked:
            break
    assert 8 < at < SYSTEM_CALLS_MAX - 1


def supervisor(space: str, who: str, interpreters: set[int]) -> int:
    """Returns the pid of init, or of the mount helper: the process that is neither."""
    for pid in map(int, processes_in_namespace(space)):
        rows = Path(f"/proc/{pid}/status").read_text().splitlines()
        number = next(row for row in rows if row.startswith("NSpid:")).split()[-1]
        if (number == "1") == (who == "init") and pid not in interpreters:
            return pid
    raise AssertionError(f"no {who} in {space}")


@pytest.mark.parametrize("who", ["init", "the mount helper"])
@pytest.mark.parametrize("what", ["fork", "pick"])
def test_a_supervisor_that_is_killed_at_any_step_leaves_nothing(
    swept: Workspace, what: str, who: str
) -> None:
    for at in range(STEPS_MAX):
        with Session(swept) as session:
            space = namespace(session)
            session.run("open('made', 'w').close()")
            children = session.fork(2) if what == "pick" else []
            interpreters = {session.pid, *(child.pid for child in children)}
            victim = supervisor(space, who, interpreters)
            killer = Killer(at, lambda: victim)  # noqa: B023
            with watched(killer), suppress(BranchingError):
                if what == "fork":
                    session.fork(2)
                else:
                    session.pick(children[0])
            inside = set(processes_in_namespace(space))
            session.abort()
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert swept.branches() == []
        assert files(swept.base) == ["seed.txt"]
        if killer.count <= at:
            break
    assert 6 < killer.count == at


@pytest.mark.parametrize(
    ("who", "what", "steps"),
    [
        ("init", "pick", {"wait4"}),
        ("the mount helper", "fork", {"setns", "umount2", "move_mount", "mount", "sendto"}),
        ("the mount helper", "pick", {"setns", "umount2", "move_mount", "mount", "sendto"}),
    ],
)
def test_a_supervisor_that_is_killed_at_any_of_its_own_steps_leaves_nothing(
    swept: Workspace, what: str, who: str, steps: set[str]
) -> None:
    """Init has no step in a fork: it only reaps those who have ended."""
    for at in range(STEPS_MAX):
        with Session(swept, hide=["seed.txt"]) as session:
            space = namespace(session)
            session.run("x = 1; open('made', 'w').close()")
            children = session.fork(2) if what == "pick" else []
            interpreters = {session.pid, *(child.pid for child in children)}
            killer = KilledAtStep(supervisor(space, who, interpreters), at)
            try:
                if what == "fork":
                    session.fork(2)
                else:
                    session.pick(children[0])
            except BranchingError:
                if who == "the mount helper" and what == "fork":
                    assert session.run("x").result() == 1
            if who == "init":  # it acts beside the caller
                ended = [Path(f"/proc/{pid}") for pid in interpreters - {children[0].pid}]
                until(lambda: not any(path.exists() for path in ended), "they were reaped")  # noqa: B023
            is_killed, passed = killer.is_killed, list(killer.passed)
            inside = set(processes_in_namespace(space))
            session.abort()
        killer.join()
        # A new namespace may have the number of one that is gone.
        until(lambda: inside.isdisjoint(processes_in_namespace(space)), "all are dead")  # noqa: B023
        assert swept.branches() == []
        assert files(swept.base) == ["seed.txt"]
        if not is_killed:
            break
    assert not is_killed
    assert not IS_KNOWN or steps <= set(map(name_of, passed))


CALLER = """
import os, sys
sys.path[:0] = {path!r}
from branching import Branch, Session, Workspace
from test_session_crash import Killer, namespace, watched

with Session(Workspace({root!r})) as session:
    print(namespace(session), flush=True)
    session.run("open('made', 'w').close()")
    killer = Killer({at}, os.getpid)
    with watched(killer):
        children = session.fork(2)
        children[0].run("open('more', 'w').close()")
        session.pick(children[0])
        session.commit()
print(killer.count)
"""


def test_a_caller_that_is_killed_at_any_step_leaves_no_process_and_a_whole_base(
    swept: Workspace,
) -> None:
    before, after = [["seed.txt"], ["made", "more", "seed.txt"]]
    seen = []
    for at in range(0, STEPS_MAX * 2, 1 if IS_SOAK else 3):
        path = [str(Path(__file__).parent)]
        code = CALLER.format(path=path, root=str(swept.root), at=at)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        space = done.stdout.splitlines()[0]
        until(lambda: not processes_in_namespace(space), "all are dead")  # noqa: B023
        with Workspace(swept.root) as reopened:
            assert reopened.branches() == [] or done.returncode == 0, done.stderr
        found = files(swept.base)
        assert found in (before, after)
        seen.append(found)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        for name in ("made", "more"):
            (swept.base / name).unlink(missing_ok=True)
    assert seen[0] == before
    assert seen[-1] == after
    assert len(seen) > 8


TRACED_CALLER = """
import sys
sys.path[:0] = {path!r}
from branching import Session, Workspace
from test_session_crash import namespace

with Session(Workspace({root!r})) as session:
    print(namespace(session), flush=True)
    sys.stdin.readline()
    session.run("open('made', 'w').close()")
    children = session.fork(2)
    children[0].run("open('more', 'w').close()")
    session.pick(children[0])
    session.commit()
"""
CALLER_STEPS_MAX = 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_caller_that_is_killed_at_any_system_call_leaves_nothing_open(
    workspace: Workspace,
) -> None:
    """No branch without a lease: the daemon writes the lease before the branch exists."""
    before, after = [["seed.txt"], ["made", "more", "seed.txt"]]
    assert workspace.store is not None
    base, seen, passed = workspace.base, [], list[str]()
    words = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    code = TRACED_CALLER.format(path=words, root=str(workspace.root))
    for at in range(0, CALLER_STEPS_MAX, 1 if IS_SOAK else 6):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as caller:
            assert caller.stdout is not None
            assert caller.stdin is not None
            space = caller.stdout.readline().strip()
            killer = KilledAtStep(caller.pid, at)
            caller.stdin.write("go\n")
            caller.stdin.close()
            killer.join()
        is_killed, passed = killer.is_killed, list(map(name_of, killer.passed))
        until(lambda: not processes_in_namespace(space), "all are dead")  # noqa: B023
        with Workspace(workspace.root) as opened:
            assert opened.branches() == [], passed
        assert not (workspace.store / "agents").exists(), passed
        found = files(base)
        assert found in (before, after), passed
        seen.append(found)
        if not is_killed:
            break
        for name in ("made", "more"):
            (base / name).unlink(missing_ok=True)
    assert not is_killed
    assert seen[0] == before
    assert seen[-1] == after
    assert {"sendto", "sendmsg", "pidfd_send_signal"} <= set(passed), passed
    assert at > 50


def test_a_refused_fork_names_a_killed_interpreter(real_workspace: Workspace) -> None:
    with Session(real_workspace) as session:
        os.kill(session.pid, signal.SIGKILL)
        with pytest.raises(MemoryBranchError, match="the interpreter of the session has ended"):
            session.fork(2)
        session.abort()
