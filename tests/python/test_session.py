"""Sessions: interpreters that fork with their memory and their files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import mounted
from support.ordinary_user import AS_STRANGER, IN_NAMESPACE, STRANGER, run_python
from support.waiting import until
from test_context import interpreter_of_everybody

import branching
from branching import (
    Child,
    CommitError,
    ConflictError,
    ForkError,
    MemoryBranchError,
    ProcessBranchError,
    ResourceLimits,
    Session,
    Workspace,
)
from branching.process.sandbox import parent_state
from branching.session import completion, interpreter, parking

OWNER = (12345, 12346)
SLEEP = str(1_000_000 + os.getpid())
"""Seconds for which programs of this run sleep: no other run's."""
LONG = 300.0
"""Seconds that nobody waits: what sleeps so long is ended."""


class Space:
    """A mounted workspace for sessions."""

    def __init__(self, base: Path, root: Path, owner: tuple[int, int]) -> None:
        self.base, self.owner = base, owner
        self.workspace = Workspace(root)

    def files(self) -> list[str]:
        """Returns the names in the base."""
        return sorted(path.name for path in self.base.iterdir() if path.name != ".branching")

    def branches(self) -> list[str]:
        return [record.name for record in self.workspace.branches()]


EVERYWHERE = pytest.mark.parametrize(
    "space", ["fuse", "overlay", "owned", "owned overlay", "namespace"], indirect=True
)


@pytest.fixture(params=["fuse", "overlay"])
def space(
    request: pytest.FixtureRequest, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Space]:
    """Workspaces with both drivers, of root and of an ordinary user, and one whose caller gets what
    callers get who are not root.
    """
    if request.param == "namespace":
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    base, root = outside / "base", outside / "mount"
    base.mkdir()
    (base / "seed.txt").write_text("seed\n")
    owner = OWNER if "owned" in request.param else (0, 0)
    for path in (base, base / "seed.txt"):
        os.chown(path, *owner)
    driver = "overlay" if "overlay" in request.param else "fuse"
    with mounted(base, root, driver=driver):
        made = Space(base, root, owner)
        yield made
        assert made.branches() == []
        made.workspace.close()


@pytest.fixture
def session(space: Space) -> Iterator[Session]:
    """A session whose files are dropped at the end."""
    with Session(space.workspace) as made:
        yield made
        made.abort()


def value(where: Session | Child, code: str) -> object:
    """Runs code that must succeed; returns the value of its last line."""
    cell = where.run(code)
    assert cell.exception is None, cell.exception.__cause__
    return cell.result()


# Running code.


def test_code_keeps_its_variables_from_cell_to_cell(session: Session) -> None:
    session.run("numbers = [1, 2]")
    cell = session.run(
        "numbers.append(3)\nprint('now')\nimport sys; print('err', file=sys.stderr)\nnumbers"
    )
    assert (cell.value, cell.text) == ([1, 2, 3], "[1, 2, 3]")
    assert (cell.stdout, cell.stderr) == ("now\n", "err\n")


def test_an_exception_comes_back_with_its_traceback(session: Session) -> None:
    cell = session.run("def divide():\n    return 1 / 0\ndivide()")
    assert isinstance(cell.exception, ZeroDivisionError)
    text = str(cell.exception.__cause__)
    assert "return 1 / 0" in text
    assert "worker.py" not in text
    with pytest.raises(ZeroDivisionError):
        cell.result()
    assert value(session, "1") == 1


def test_code_that_is_no_python_is_a_syntax_error(session: Session) -> None:
    assert isinstance(session.run("1 +").exception, SyntaxError)


def test_exiting_is_an_exception_like_any(session: Session) -> None:
    assert isinstance(session.run("import sys; sys.exit(3)").exception, SystemExit)
    assert value(session, "2") == 2


def test_a_value_that_is_no_plain_data_comes_back_as_text(session: Session) -> None:
    cell = session.run("import threading; threading.Event")
    assert cell.value is None
    assert cell.text == "<class 'threading.Event'>"


def test_a_function_sees_the_variables_of_the_session(session: Session) -> None:
    session.run("data = [1, 2, 3]")

    def total(factor: int) -> int:
        return int(sum(data) * factor)  # type: ignore[name-defined]  # noqa: F821

    assert session.run(total, 2).result() == 12
    session.run("data = [5]")
    assert session.run(total, 3).result() == 15


def test_a_function_whose_value_cannot_be_sent_is_an_error(session: Session) -> None:
    cell = session.run(lambda: [threading.Lock()])
    assert cell.success
    with pytest.raises(ProcessBranchError, match="cannot be sent back"):
        cell.result()


def test_output_of_any_size_arrives_whole(space: Space) -> None:
    arrived: list[bytes] = []
    with Session(space.workspace, stdout=arrived.append) as session:
        cell = session.run("print('x' * 3_000_000)")
        assert len(cell.stdout) == 3_000_001
        assert b"".join(arrived).decode() == cell.stdout
        session.abort()


def test_code_is_interrupted_after_its_time(session: Session) -> None:
    with pytest.raises(TimeoutError, match="was interrupted"):
        session.run(f"import time; time.sleep({LONG})", timeout=0.2)
    assert value(session, "3") == 3


def test_a_killed_interpreter_is_named(session: Session) -> None:
    with pytest.raises(MemoryBranchError, match="the interpreter of the session has ended"):
        session.run("import os; os._exit(3)")


# Forking.


@EVERYWHERE
def test_children_have_the_memory_and_branches_of_their_own(space: Space) -> None:
    with Session(space.workspace) as session:
        session.run("state = {'tries': 0}; open('shared.txt', 'w').write('before')")
        children = session.fork(3)
        for child in children:
            child.run(
                f"state['tries'] = {child.index + 1}; open('own.txt', 'w').write('{child.index}')"
            )
        seen = [
            value(child, "(state['tries'], open('own.txt').read(), open('shared.txt').read())")
            for child in children
        ]
        assert seen == [(index + 1, str(index), "before") for index in range(3)]
        changes = session.pick(children[1])
        assert [change.path for change in changes] == ["own.txt"]
        assert value(session, "(state['tries'], open('own.txt').read())") == (2, "1")
        assert space.files() == ["seed.txt"]
    assert space.files() == ["own.txt", "seed.txt", "shared.txt"]
    assert (space.base / "own.txt").read_text() == "1"
    assert (space.base / "own.txt").stat().st_uid == space.owner[0]


@EVERYWHERE
def test_open_files_and_the_directory_follow_into_the_child_and_back(
    session: Session, space: Space
) -> None:
    session.run(
        "import os\n"
        "os.mkdir('sub'); os.chdir('sub')\n"
        "log = open('../log.txt', 'a'); log.write('one\\n'); log.flush()\n"
        "log.write('buffered\\n')\n"
        "half = open('../seed.txt'); half.read(2)\n"
        "raw = os.open('../raw', os.O_RDWR | os.O_CREAT); twin = os.dup(raw); os.write(raw, b'abc')"
    )
    for generation in range(3):
        children = session.fork(2)
        for child in children:
            child.run(
                f"log.write('{generation}.{child.index}\\n'); log.flush(); os.write(twin, b'{child.index}')"
            )
        session.pick(children[1])
    assert value(session, "open('../log.txt').read()") == "one\nbuffered\n0.1\n1.1\n2.1\n"
    assert value(session, "half.read()") == "ed\n"
    assert value(session, "os.pread(raw, 100, 0), os.lseek(raw, 0, 1)") == (b"abc111", 6)
    assert value(session, "os.getcwd()") == str(space.workspace.seen_at / "sub")


def test_the_session_writes_after_a_pick_of_a_child_that_changed_no_file(session: Session) -> None:
    """The other children's branches would keep the session's branch frozen."""
    children = session.fork(3)
    children[1].run("x = 1")
    assert session.pick(children[1]) == []
    assert value(session, "open('made', 'w').write('1'), x") == (1, 1)


def test_dropped_children_leave_no_entry_in_the_process_table(session: Session) -> None:
    session.run("import os")
    for _ in range(5):
        session.fork(2)
        session.none()
    ended = r"sum('\nState:\tZ' in open(f'/proc/{p}/status').read() for p in os.listdir('/proc') if p.isdigit())"

    def are_gone() -> bool:
        session.fork(1)
        session.none()
        return value(session, ended) in (0, 1)

    until(are_gone, "they are gone")


def test_a_database_is_connected_again_after_a_commit(session: Session, space: Space) -> None:
    """SQLite refuses to write to a file whose inode number has changed."""
    session.run(
        "import sqlite3; db = sqlite3.connect('data.db'); db.execute('create table t (x)'); db.commit()"
    )
    child = session.fork(1)[0]
    value(child, "db.execute('insert into t values (1)'); db.commit()")
    session.pick(child)
    session.commit()
    write = "db.execute('insert into t values (2)'); db.commit()"
    value(
        session,
        f"try:\n    {write}\nexcept sqlite3.OperationalError:\n    db = sqlite3.connect('data.db'); {write}",
    )
    session.commit()
    assert value(session, "db.execute('select x from t').fetchall()") == [(1,), (2,)]


def test_none_continues_as_before_the_fork(session: Session) -> None:
    session.run("x = 1; log = open('log', 'a'); log.write('mine\\n')")
    children = session.fork(2)
    children[0].run("x = 2; log.write('theirs\\n'); log.flush()")
    session.none()
    assert value(session, "log.write('again\\n'); log.flush(); x, open('log').read()") == (
        1,
        "mine\nagain\n",
    )
    with pytest.raises(MemoryBranchError, match="has ended: none of the children was picked"):
        children[0].run("1")


def test_a_session_that_has_forked_waits(session: Session) -> None:
    children = session.fork(1)
    for attempt in (lambda: session.run("1"), lambda: session.fork(1), session.commit):
        with pytest.raises(MemoryBranchError, match="has forked"):
            attempt()
    session.pick(children[0])
    with pytest.raises(MemoryBranchError, match="is not a child of this session"):
        session.pick(children[0])
    with pytest.raises(MemoryBranchError, match="there are no children"):
        session.none()


def test_losers_and_what_they_have_started_are_dead_after_pick(session: Session) -> None:
    children = session.fork(3)
    started = f"import subprocess; p = subprocess.Popen(['setsid', 'sleep', '{SLEEP}'])"
    for child in children[1:]:
        child.run(started)
    pids = [session.pid, *(child.pid for child in children[1:])]
    until(lambda: len(_sleeping()) == 2, "the programs run")
    session.pick(children[0])
    running = [pid for pid in pids if not _is_dying(pid)]
    assert running == []
    until(lambda: all(map(_is_zombie, pids)), "they are dead")
    until(lambda: _sleeping() == [], "so is what they have started")
    assert value(session, "1") == 1


def _sleeping() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes() == b"sleep\0%s\0" % SLEEP.encode():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _is_dying(pid: int) -> bool:
    """Whether a process is dead, or has SIGKILL to handle: then it runs nothing any more."""
    try:
        rows = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
    except OSError:
        return True
    is_killed = int(rows["ShdPnd"], 16) | int(rows["SigPnd"], 16)
    return "Z" in rows["State"] or bool(is_killed >> 8 & 1) or "VmRSS" not in rows


def _is_zombie(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_children_run_at_the_same_time(session: Session) -> None:
    children = session.fork(2)
    code = """
import os, time
open('/tmp/{own}', 'w').close()
for _ in range(3000):
    if os.path.exists('/tmp/{other}'):
        break
    time.sleep(0.01)
os.path.exists('/tmp/{other}')
"""

    async def both() -> list[object]:
        cells = await asyncio.gather(
            children[0].run_async(code.format(own=0, other=1)),
            children[1].run_async(code.format(own=1, other=0)),
        )
        return [cell.value for cell in cells]

    assert asyncio.run(both()) == [True, True]
    session.none()


MOUNTS = "[line.split()[4] for line in open('/proc/self/mountinfo')]"


@EVERYWHERE
@pytest.mark.timeout(1800)
def test_a_hundred_generations(session: Session) -> None:
    session.run("count = 0; log = open('log.txt', 'a')")
    session.run(f"import os; own = os.getcwd().replace(' ', r'\\040'); before = {MOUNTS}")
    for generation in range(100):
        children = session.fork(2)
        winner = children[generation % 2]
        winner.run(f"count += 1; log.write('{generation}\\n'); log.flush()")
        session.pick(winner)
    assert value(session, "count") == 100
    text = "".join(f"{generation}\n" for generation in range(100))
    assert value(session, "open('log.txt').read()") == text
    own = "sum(place.startswith(own) for place in {})"
    assert value(session, f"0 < {own.format('before')} == {own.format(MOUNTS)}") is True
    # Mounts of other programs come and go elsewhere. A leak would be one a generation.
    assert value(session, f"len({MOUNTS}) < len(before) + 50") is True


# Committing.


@EVERYWHERE
def test_commit_writes_the_base_and_the_session_continues(space: Space) -> None:
    with Session(space.workspace) as session:
        session.run("log = open('log.txt', 'a'); log.write('first\\n')")
        assert [change.path for change in session.commit()] == ["log.txt"]
        assert (space.base / "log.txt").read_text() == "first\n"
        session.run("log.write('second\\n')")
        assert (space.base / "log.txt").read_text() == "first\n"
        session.commit()
        assert (space.base / "log.txt").read_text() == "first\nsecond\n"
        session.run("log.write('third\\n')")
    assert (space.base / "log.txt").read_text() == "first\nsecond\nthird\n"


def test_a_proxy_of_an_object_that_is_gone_does_not_keep_files_from_being_written(
    space: Space,
) -> None:
    with Session(space.workspace) as session:
        session.run("import weakref; gone = {1}; proxy = weakref.proxy(gone); del gone")
        session.run("file = open('made', 'w'); file.write('one')")
        session.commit()
        assert (space.base / "made").read_text() == "one"
        session.run("file.write('two')")
    assert (space.base / "made").read_text() == "onetwo"


def test_a_refused_commit_leaves_the_session_as_it_was(space: Space) -> None:
    with Session(space.workspace) as session:
        session.run("log = open('seed.txt', 'a'); log.write('ours\\n'); log.flush()")
        (space.base / "seed.txt").write_text("theirs, longer\n")
        with pytest.raises(ConflictError):
            session.commit()
        session.run("log.write('more\\n'); log.flush()")
        assert value(session, "open('seed.txt').read()") == "seed\nours\nmore\n"
        session.commit(force=True)
    assert (space.base / "seed.txt").read_text() == "seed\nours\nmore\n"


def test_a_refused_pick_leaves_everything_as_it_was(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("x = 1")
    children = session.fork(2)
    children[0].run("x = 2; log = open('log', 'a'); log.write('kept\\n')")
    children[1].run("x = 3")
    with monkeypatch.context() as patch:

        def refuse() -> None:
            raise CommitError("the disk is full")

        patch.setattr(children[0].branch, "commit", refuse)
        with pytest.raises(CommitError, match="the disk is full"):
            session.pick(children[0])
    assert value(children[1], "x") == 3
    children[0].run("log.write('on\\n'); log.flush()")
    assert session.children == children
    session.pick(children[0])
    assert value(session, "x, open('log').read()") == (2, "kept\non\n")


def test_an_exception_drops_the_files(space: Space) -> None:
    with pytest.raises(KeyError), Session(space.workspace) as session:
        session.run("open('new', 'w').close()")
        session.fork(2)
        raise KeyError
    assert space.files() == ["seed.txt"]


def test_leaving_with_children_commits_what_was_before_the_fork(space: Space) -> None:
    with Session(space.workspace) as session:
        session.run("file = open('new', 'w'); file.write('buffered')")
        session.fork(2)[0].run("open('theirs', 'w').close()")
    assert (space.base / "new").read_text() == "buffered"
    assert space.files() == ["new", "seed.txt"]


GENERATIONS = """
import os
from branching import Session

assert os.geteuid() == {user}
with Session(".") as session:
    session.run("x = 1; log = open('log', 'a')")
    for turn in range({count}):
        children = session.fork(2)
        for child in children:
            child.run("x += 1; log.write('.'); log.flush()").result()
        session.pick(children[1])
        session.commit()
    print(session.run("x").value)
print(open("log").read(), os.stat("log").st_uid)
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("driver", ["fuse", "overlay"])
def test_an_ordinary_user_has_sessions_of_a_hundred_generations(driver: str) -> None:
    """With the overlay driver root has mounted the workspace."""
    code = GENERATIONS.format(user=STRANGER, count=100)
    done = run_python(["-c", code], may_mount=True, driver=driver)
    assert (done.stdout, done.stderr) == (f"101\n{'.' * 100} {STRANGER}\n", "")


def test_root_of_a_user_namespace_has_sessions() -> None:
    how = f"{AS_STRANGER} {IN_NAMESPACE} --mount"
    done = run_python(["-c", GENERATIONS.format(user=0, count=3)], how=how)
    assert (done.stdout, done.stderr) == ("4\n... 0\n", "")


def test_a_session_opens_a_directory_as_a_workspace(outside: Path) -> None:
    with Session(outside) as session:
        session.run("open('made', 'w').write('here')")
    assert (outside / "made").read_text() == "here"


def test_a_session_in_a_branch_commits_into_it(space: Space) -> None:
    with space.workspace.branch("outer", on_success=None) as outer:
        with Session(outer) as session:
            session.run("open('made', 'w').write('here')")
            child = session.fork(1)[0]
            session.pick(child)
        assert (outer.path / "made").read_text() == "here"
        assert space.files() == ["seed.txt"]
        outer.abort()


def test_async_methods_do_the_same(space: Space) -> None:
    async def use() -> object:
        async with Session(space.workspace) as session:
            await session.run_async("x = 1")
            children = await session.fork_async(2)
            await children[1].run_async("x = 5; open('new', 'w').close()")
            await session.pick_async(children[1])
            await session.fork_async(1)
            await session.none_async()
            await session.commit_async()
            found = (await session.run_async("x")).value
            await session.abort_async()
            return found

    assert asyncio.run(use()) == 5
    assert space.files() == ["new", "seed.txt"]


def test_cancelling_a_task_interrupts_its_code(space: Space) -> None:
    async def use() -> object:
        async with Session(space.workspace) as session:
            task = asyncio.create_task(
                session.run_async(f"import time; open('/tmp/x', 'w'); time.sleep({LONG})")
            )
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return (await session.run_async("7")).value

    assert asyncio.run(use()) == 7


# Refusals.

REFUSED = {
    "threads": (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(300,), name='beat', daemon=True); t.start()",
        "running threads, which a fork does not copy: beat",
    ),
    "child processes": (
        "import subprocess; p = subprocess.Popen(['sleep', '300'])",
        "a running child process: sleep 300",
    ),
    "detached programs": (
        "import subprocess, time; subprocess.run('setsid sleep 300 >/dev/null 2>&1 &', shell=True)",
        "a running child process: .*sleep 300",
    ),
    "shared mappings of workspace files": (
        "import mmap; f = open('seed.txt', 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close()",
        "shared writable memory: /.*seed.txt",
    ),
    "shared anonymous memory": (
        "import mmap; m = mmap.mmap(-1, 4096)",
        "shared writable memory: /dev/zero",
    ),
    "temporary files": (
        "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x')",
        "open for writing outside of the workspace: /tmp/",
    ),
    "deleted files": (
        "import os; f = open('gone', 'w'); os.remove('gone')",
        "an open file of the workspace that was deleted: .*gone",
    ),
    "named pipes": (
        "import os; os.mkfifo('pipe'); f = os.open('pipe', os.O_RDWR)",
        "an open special file of the workspace: .*pipe",
    ),
    "locks": (
        "import fcntl; f = open('locked', 'w'); fcntl.lockf(f, fcntl.LOCK_EX)",
        "a lock on .*locked",
    ),
    "a transaction of a database": (
        "import sqlite3; db = sqlite3.connect('data.db'); db.execute('create table t (x)'); db.execute('begin immediate')",
        "a lock on .*data.db",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_fork_is_refused_by_name(session: Session, what: str) -> None:
    code, message = REFUSED[what]
    session.run("x = 1")
    value(session, code)
    with pytest.raises(MemoryBranchError, match=message) as caught:
        session.fork(2)
    assert "did not fork" in caught.value.message
    assert "Nothing was changed" in caught.value.message
    assert session.children == []
    assert value(session, "x") == 1


def test_a_pick_is_refused_by_name_and_the_child_continues(session: Session) -> None:
    children = session.fork(2)
    children[0].run("import subprocess; p = subprocess.Popen(['sleep', '300'])")
    with pytest.raises(MemoryBranchError, match="a running child process: sleep 300"):
        session.pick(children[0])
    children[0].run("p.kill(); p.wait(); x = 1")
    session.pick(children[0])
    assert value(session, "x") == 1


def test_a_child_that_runs_code_is_not_picked(session: Session) -> None:
    children = session.fork(1)
    thread = threading.Thread(
        target=lambda: children[0].run(
            f"import time\ntry:\n    open('started', 'w').close(); time.sleep({LONG})\nexcept KeyboardInterrupt:\n    pass"
        )
    )
    thread.start()
    until((children[0].branch.path / "started").exists, "the code runs")
    with pytest.raises(MemoryBranchError, match="it still runs code"):
        session.pick(children[0])
    children[0].interrupt()
    thread.join()
    session.pick(children[0])


def test_threads_are_allowed_on_request(session: Session) -> None:
    session.run(
        "import threading, time; t = threading.Thread(target=time.sleep, args=(300,), daemon=True); t.start()"
    )
    children = session.fork(1, allow_threads=True)
    assert value(children[0], "t.is_alive(), threading.active_count()") == (False, 1)
    session.none()
    assert value(session, "t.is_alive()") is True


def test_sockets_are_a_warning(session: Session) -> None:
    session.run("import socket; s = socket.socket()")
    with pytest.warns(UserWarning, match="socket:.* is shared by all"):
        session.fork(1)


def test_an_idle_database_connection_survives(session: Session) -> None:
    session.run(
        "import sqlite3; db = sqlite3.connect('data.db')\n"
        "db.execute('create table t (x)'); db.execute('insert into t values (1)'); db.commit()"
    )
    children = session.fork(2)
    for child in children:
        child.run(f"db.execute('insert into t values ({child.index + 10})'); db.commit()")
    session.pick(children[1])
    assert value(session, "db.execute('select x from t').fetchall()") == [(1,), (11,)]


def test_a_cuda_context_is_refused() -> None:
    found = os.stat_result((0o020666, *(0,) * 9))
    refusal = parking.refused_file("/ws", "/dev/nvidia0", found, os.O_RDWR)
    assert refusal == "a CUDA context: /dev/nvidia0 is open"


@pytest.mark.parametrize("n", [0, -1, 65])
def test_impossible_numbers_of_children_are_refused(session: Session, n: int) -> None:
    with pytest.raises(ValueError, match="n must be from 1 to 64"):
        session.fork(n)


# Walls.


@EVERYWHERE
def test_only_the_interpreter_has_a_capability_and_it_is_not_effective(session: Session) -> None:
    child = session.fork(1)[0]
    names = ("CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp:")
    code = f"[l.split()[1] for l in open('/proc/self/status') if l.startswith({names})]"
    assert value(child, code) == ["0" * 10 + "200000", "0" * 16, "0" * 16, "1", "2"]
    code = """
import os
pid = os.fork()
if pid == 0:
    os.dup2(os.open('caps', os.O_CREAT | os.O_WRONLY), 1)
    os.execvp('grep', ['grep', 'Cap', '/proc/self/status'])
os.waitpid(pid, 0)
open('caps').read()
"""
    of_program = value(child, code)
    assert isinstance(of_program, str)
    assert {line.split()[1] for line in of_program.splitlines()} == {"0" * 16}


RAISED = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
head = struct.pack("=Ii", 0x20080522, 0)
raised = libc.syscall(126, head, struct.pack("=6I", 1 << 21, 1 << 21, 0, 0, 0, 0))
calls = {"mount": 165, "umount2": 166, "pivot_root": 155, "setns": 308, "open_tree": 428,
         "fsopen": 430, "bpf": 321, "keyctl": 250, "open_by_handle_at": 304, "move_mount": 429,
         "mount_setattr": 442, "fspick": 433}
done = [name for name, number in calls.items() if libc.syscall(number, b"/", b"/tmp", None, 4096, None) >= 0]
done += [hex(flag) for flag in (0x10000000, 0x10020000, 0x40000000, 0x20000000, 0x4000000, 0x8000000, 0x2000000, 0x80)
         if libc.syscall(272, flag) == 0]
done += ["detach" for path in (b"/proc", b"/dev", b"/run", BASE, b"/tmp") if libc.umount2(path, 2) == 0]
done += ["chroot"] if libc.chroot(b"/tmp") == 0 else []
done += ["write"] if libc.open(b"/etc/made", 0o101, 0o644) >= 0 else []
after = libc.unshare(0x20000)
done += ["detach after"] if libc.umount2(BASE, 2) == 0 else []
raised, after, done
"""


@EVERYWHERE
def test_the_capability_serves_for_nothing_but_a_copy_of_the_mount_table(
    session: Session, space: Space
) -> None:
    child = session.fork(1)[0]
    code = f"BASE = {os.fsencode(space.base)!r}\n{RAISED}"
    assert value(child, code) == (0, 0, [])
    hidden = f"import os; [os.path.exists(p) and os.listdir(p) for p in ({str(space.base)!r}, {str(space.base / '.branching')!r})]"
    assert value(child, hidden) == [[], False]


def test_a_child_that_copies_its_mount_table_is_killed_all_the_same(session: Session) -> None:
    children = session.fork(2)
    code = """
import ctypes, os, struct
libc = ctypes.CDLL(None)
if os.fork() == 0:
    libc.syscall(126, struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 1 << 21, 1 << 21, 0, 0, 0, 0))
    libc.unshare(0x20000)
    libc.prctl(36, 0)
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", SLEEP])
    os._exit(0)
os.wait()
"""
    children[1].run(f"SLEEP = '{SLEEP}'\n{code}")
    until(lambda: len(_sleeping()) == 1, "the program runs")
    session.pick(children[0])
    until(lambda: _sleeping() == [], "the program is dead")


def test_limits_hold_for_the_session_and_its_children_together(space: Space) -> None:
    with Session(space.workspace, limits=ResourceLimits(pids=20)) as session:
        children = session.fork(2)
        code = """
import os, time
made = 0
try:
    for _ in range(40):
        if os.fork() == 0:
            time.sleep(300); os._exit(0)
        made += 1
except BlockingIOError:
    pass
made
"""
        first = value(children[0], code)
        assert isinstance(first, int)
        assert 0 < first < 20
        with pytest.raises(BlockingIOError):
            children[1].run("import os\nif os.fork() == 0: os._exit(0)").result()
        session.abort()


HIDDEN = """
import os
def look(path):
    try:
        return os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError as error:
        return error.strerror
"""
LOOK = "look('.env'), look('keys'), look('seed.txt')"


@EVERYWHERE
def test_hidden_files_stay_hidden_in_children_and_in_later_branches(space: Space) -> None:
    (space.base / ".env").write_text("TOKEN=1\n")
    (space.base / "keys").mkdir()
    (space.base / "keys" / "private").write_text("key\n")
    for path in (space.base / ".env", space.base / "keys", space.base / "keys" / "private"):
        os.chown(path, *space.owner)
    denied = ("Permission denied", "Permission denied", "seed\n")
    with Session(space.workspace, hide=["**/.env", "keys"]) as session:
        session.run(HIDDEN)
        assert value(session, LOOK) == denied
        for generation in range(3):
            children = session.fork(2)
            for child in children:
                assert value(child, LOOK) == denied
            children[1].run(f"open('made', 'w').write('{generation}')")
            session.pick(children[1])
            assert value(session, LOOK) == denied
            session.commit()
            assert value(session, LOOK) == denied
    assert (space.base / ".env").read_text() == "TOKEN=1\n"
    assert (space.base / "made").read_text() == "2"


@EVERYWHERE
def test_a_child_ends_when_a_hidden_file_of_its_branch_is_replaced_from_outside(
    space: Space,
) -> None:
    (space.base / ".env").write_text("TOKEN=1\n")
    os.chown(space.base / ".env", *space.owner)
    with Session(space.workspace, hide=["**/.env"]) as session:
        children = session.fork(2)
        (children[0].branch.path / ".env").unlink()
        until(lambda: not children[0].is_alive, "the child whose cover has gone is dead")
        with pytest.raises(MemoryBranchError, match="a hidden file of its branch was removed"):
            children[0].run("1")
        assert value(children[1], "1") == 1
        session.pick(children[1])
        assert value(session, "2") == 2
        session.abort()


@EVERYWHERE
def test_a_child_lives_on_when_a_program_removes_its_own_socket(
    space: Space, outside: Path
) -> None:
    """The sandbox covers sockets too, and those covers may go."""
    (space.base / ".env").write_text("TOKEN=1\n")
    os.chown(space.base / ".env", *space.owner)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(outside / "socket"))
        listener.listen()
        with Session(space.workspace, hide=["**/.env"]) as session:
            (child,) = session.fork(1)
            covers = "sum('.covered' in line for line in open('/proc/self/mountinfo'))"
            before = value(child, covers)
            (outside / "socket").unlink()
            until(lambda: value(child, covers) != before, "the cover has gone with the socket")
            time.sleep(0.2)
            assert child.is_alive
            session.abort()


@pytest.mark.parametrize("hide", ["**/.env", ["/etc"], ["../x"], [""]])
def test_impossible_globs_are_refused(space: Space, hide: list[str]) -> None:
    with pytest.raises((TypeError, ValueError), match="glob"):
        Session(space.workspace, hide=hide)


# Another interpreter.


@pytest.fixture
def environment(space: Space) -> Path:
    """The interpreter of a virtual environment in the workspace, with an additional module."""
    place = space.base / "env"
    subprocess.run([interpreter_of_everybody(), "-m", "venv", "--without-pip", place], check=True)
    site = next(place.glob("lib/python*/site-packages"))
    (site / "only_here.py").write_text("value = 42\n")
    for path in (place, *place.rglob("*")):
        os.chown(path, *space.owner, follow_symlinks=False)
    return space.workspace.seen_at / "env/bin/python"


@EVERYWHERE
def test_an_interpreter_of_a_virtual_environment_forks_and_is_picked(
    space: Space, environment: Path
) -> None:
    with Session(space.workspace, python=environment) as session:
        session.run("import only_here, sys; x = only_here.value; log = open('log', 'a')")
        assert value(session, "sys.prefix") == str(environment.parent.parent)
        children = session.fork(2)
        for child in children:
            child.run(f"x += {child.index}; log.write('{child.index}'); log.flush()").result()
        session.pick(children[1])
        assert value(session, "x, open('log').read()") == (43, "1")
        session.commit()
        names = ("CapInh", "CapPrm", "CapEff", "CapAmb")
        code = f"[l.split()[1] for l in open('/proc/self/status') if l.startswith({names})]"
        assert value(session, code) == ["0" * 16, "0" * 10 + "200000", "0" * 16, "0" * 16]
        program = "import subprocess; subprocess.check_output(['grep', 'Cap', '/proc/self/status'], text=True)"
        of_program = value(session, program)
        assert isinstance(of_program, str)
        assert {line.split()[1] for line in of_program.splitlines()} == {"0" * 16}
    assert (space.base / "log").read_text() == "1"


def test_an_interpreter_in_a_directory_that_the_sandbox_covers(
    space: Space, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", symlinks=True)
    with Session(space.workspace, python=tmp_path / "env/bin/python") as session:
        assert value(session, "import sys; sys.prefix") == str(tmp_path / "env")


def test_an_interpreter_of_another_version_runs_code_and_names_functions(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(space.workspace, python=sys.executable) as session:
        assert session.run(lambda: 6 * 7).result() == 42
        monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
        with pytest.raises(
            ForkError, match=r"interpreter is cpython-3[0-9]*, and this one is cpython-"
        ):
            session.run(lambda: 1)
        assert value(session, "1") == 1
        child = session.fork(1)[0]
        with pytest.raises(ForkError, match="the function did not run"):
            child.run(lambda: 1)
        assert child.run(completion.names, "isinst").value == ["isinstance("]


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_interpreters_that_cannot_serve_are_named(space: Space, outside: Path) -> None:
    with pytest.raises(FileNotFoundError, match="python='/no/python': there is no such program"):
        Session(space.workspace, python="/no/python")
    with pytest.raises(TypeError, match="python must be a path"):
        Session(space.workspace, python=b"python")  # type: ignore[arg-type]
    silent = program(outside / "silent", "exit 3")
    with (
        pytest.raises(MemoryBranchError, match="has ended"),
        Session(space.workspace, python=silent),
    ):
        pass
    old = program(
        outside / "old",
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, 9); '
        'del sys.argv[1]; exec(sys.argv.pop(1))" "$@"',
    )
    message = "it is Python 3.9, and a session needs 3.10"
    with pytest.raises(MemoryBranchError, match=message), Session(space.workspace, python=old):
        pass
    closed = program(outside / "closed", "exit")
    closed.write_text("no program")
    message = "closed: Exec format error"
    with pytest.raises(MemoryBranchError, match=message), Session(space.workspace, python=closed):
        pass


# Crashes.


def test_when_the_caller_is_killed_nothing_is_left(space: Space) -> None:
    script = f"""
import sys
from branching import Session, Workspace
session = Session(Workspace({str(space.workspace.root)!r})).__enter__()
session.run("open('new', 'w').close()")
children = session.fork(2)
print(session.pid, *(child.pid for child in children), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        pids = caller.stdout.readline().split()
        assert len(pids) == 3
        caller.kill()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all are dead")
    assert Workspace(space.workspace.root).dropped != []
    assert space.files() == ["seed.txt"]


def test_a_killed_child_can_not_be_picked_and_the_others_can(session: Session) -> None:
    children = session.fork(2)
    os.kill(children[0].pid, 9)
    with pytest.raises(MemoryBranchError, match="child 0 has ended"):
        session.pick(children[0])
    children[1].run("x = 4")
    session.pick(children[1])
    assert value(session, "x") == 4


def test_a_killed_session_can_still_pick_a_child(session: Session) -> None:
    children = session.fork(2)
    os.kill(session.pid, 9)
    children[1].run("x = 4")
    session.pick(children[1])
    assert value(session, "x") == 4


def test_a_session_that_hangs_is_named(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "ANSWER_SECONDS_MAX", 0.1)
    os.kill(session.pid, signal.SIGSTOP)
    with pytest.raises(MemoryBranchError, match="the interpreter of the session does not answer"):
        session.fork(1)


def test_only_branches_of_the_overlay_driver_have_detached_mounts(
    space: Space, request: pytest.FixtureRequest
) -> None:
    """Root's daemon sends one to an ordinary user, who may not clone it."""
    with space.workspace.branch("a", on_success=None) as branch:
        (branch.path / "made").write_text("1")
        mount = branch.detached_mount()
        if request.node.callspec.params["space"] == "fuse":
            assert mount is None
        else:
            assert mount is not None
            assert os.stat("made", dir_fd=mount).st_size == 1
            os.close(mount)
        branch.abort()


def test_a_session_serves_one_with(space: Space) -> None:
    session = Session(space.workspace)
    with session:
        session.run("1")
    with pytest.raises(MemoryBranchError, match="one `with`"), session:
        pass
    with pytest.raises(MemoryBranchError, match="does not run"):
        session.run("1")


def test_the_names_are_exported() -> None:
    assert branching.Session is Session
