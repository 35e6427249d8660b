"""States of programs that a session carries over to its children, or refuses to fork by name.

All are tried with both drivers, by root and by an ordinary user (`support.session_states`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import mounted
from support.ordinary_user import PLACE, run_python
from support.session_states import SURVIVING, failures

from branching import Session, Workspace
from branching.session import parking

GROUPS = [*SURVIVING, "refused"]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(params=["fuse", "overlay"])
def workspace(request: pytest.FixtureRequest, outside: Path) -> Iterator[Workspace]:
    base = outside / "base"
    base.mkdir()
    (base / "seed.txt").write_text("seed\n")
    with mounted(base, outside / "mount", driver=request.param) as root, Workspace(root) as made:
        yield made


@pytest.mark.parametrize("group", GROUPS)
def test_a_state_is_carried_over_or_refused(workspace: Workspace, group: str) -> None:
    assert failures(workspace, group) == {}
    if group == "memory":
        assert (workspace.base / "exits").read_text() == "x"


@pytest.mark.parametrize("driver", ["fuse", "overlay"])
def test_the_same_holds_for_an_ordinary_user(driver: str) -> None:
    code = f"""
import runpy, sys
open("seed.txt", "w").write("seed\\n")
sys.path.insert(0, "{PLACE}/tree/tests/python")
runpy.run_module("support.session_states", run_name="__main__")
"""
    done = run_python(["-c", code, ".", *GROUPS], may_mount=True, driver=driver)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {group: {} for group in GROUPS}


@pytest.mark.filterwarnings("ignore:.*threads of libraries.*:UserWarning")
def test_openmp_that_has_run_before_the_fork_runs_in_a_child(real_workspace: Workspace) -> None:
    with Session(real_workspace) as session:
        train = "model = HistGradientBoostingRegressor(max_iter=2).fit(x, x[:, 0])"
        session.run(
            "import numpy as np\n"
            "from sklearn.ensemble import HistGradientBoostingRegressor\n"
            f"x = np.arange(200.0).reshape(100, 2)\n{train}"
        ).result()
        children = session.fork(1)
        children[0].run(train, timeout=60).result()
        session.pick(children[0])
        session.run(train, timeout=60).result()
        session.abort()


@pytest.mark.filterwarnings("ignore:the interpreter of the session. descriptor:UserWarning")
def test_an_event_loop_that_is_open_is_a_warning(real_workspace: Workspace) -> None:
    with Session(real_workspace) as session:
        session.run("import asyncio; loop = asyncio.new_event_loop()").result()
        with pytest.warns(UserWarning, match="anon_inode:.eventpoll.* is shared by all"):
            children = session.fork(1)
        child = children[0]
        value = child.run("loop.run_until_complete(asyncio.sleep(0, 5))").result()
        assert value == 5
        session.abort()


def test_obstacles_name_memory_that_is_mapped() -> None:
    line = "7f00-7f01 rw-s 00000000 00:01 12 /dev/shm/x\n"
    assert parking.shared_mappings([line]) == ["shared writable memory: /dev/shm/x"]
