"""BestOfN and Speculate with `session=`: candidates start from the memory of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.waiting import until

from branching import BestOfN, MemoryBranchError, Session, Speculate, Workspace

LONG = 300.0


@pytest.fixture
def session(real_workspace: Workspace) -> Iterator[Session]:
    with Session(real_workspace) as made:
        made.run("data = [3, 1, 2]; log = open('log', 'a')").result()
        yield made
        made.abort()


def test_the_best_code_becomes_the_session(session: Session) -> None:
    codes = [f"data.append({n}); log.write('{n}'); log.flush()\n(True, {n})" for n in (5, 9, 7)]
    outcome = BestOfN(codes, session=session)()
    assert outcome.committed
    assert outcome.winner is not None
    assert (outcome.winner.branch_index, outcome.winner.score) == (1, 9.0)
    assert [result.state for result in outcome.all_results] == ["succeeded", "won", "succeeded"]
    assert [change.path for change in outcome.changes] == ["log"]
    assert session.run("data, open('log').read()").result() == ([3, 1, 2, 9], "9")


def test_functions_see_the_variables_and_the_evaluation_sees_the_files(session: Session) -> None:
    def task(path: Path, number: int) -> bool:
        (path / "size").write_text(str(sum(data) * (number + 1)))  # type: ignore[name-defined]  # noqa: F821
        return number < 2

    outcome = BestOfN(
        task, 3, session=session, evaluate=lambda path: float((path / "size").read_text())
    )()
    assert [result.state for result in outcome.all_results] == ["succeeded", "won", "failed"]
    assert outcome.winner is not None
    assert outcome.winner.score == 12.0
    assert session.run("open('size').read()").result() == "12"


def test_the_first_success_ends_the_others(session: Session) -> None:
    codes = [f"import time; time.sleep({LONG})", "x = 5\nTrue", "False"]
    outcome = Speculate(codes, session=session)()
    assert outcome.winner is not None
    assert outcome.winner.branch_index == 1
    assert session.run("x").result() == 5
    assert session.children == []


def test_without_a_success_the_session_goes_on_as_before(session: Session) -> None:
    outcome = Speculate(["data.clear()\nFalse", "data.clear(); 1 / 0"], session=session)()
    assert (outcome.committed, outcome.winner, outcome.timed_out) == (False, None, False)
    assert [result.state for result in outcome.all_results] == ["failed", "error"]
    assert isinstance(outcome.all_results[1].exception, ZeroDivisionError)
    assert session.run("data").result() == [3, 1, 2]


def test_after_the_time_limit_the_best_so_far_is_picked(session: Session) -> None:
    codes = ["x = 1\n(True, 1)", f"import time; time.sleep({LONG})"]
    outcome = BestOfN(codes, session=session, timeout=1)()
    assert outcome.winner is not None
    assert outcome.winner.branch_index == 0
    assert session.run("x").result() == 1
    late = BestOfN([f"import time; time.sleep({LONG})"], session=session, timeout=0.3)()
    assert (late.timed_out, late.committed) == (True, False)
    assert session.run("x").result() == 1


def test_an_evaluation_that_raises_leaves_the_session_as_it_was(session: Session) -> None:
    def evaluate(_: Path) -> float:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        BestOfN(["data.clear()\nTrue", "True"], session=session, evaluate=evaluate)()
    assert session.run("data").result() == [3, 1, 2]


def test_scores_hold_where_none_is_returned(session: Session) -> None:
    codes = ["x = 0\nTrue", "x = 1\n(True, 5)", "x = 2\nTrue"]
    outcome = BestOfN(codes, session=session, scores=[6, 9, 7])()
    assert [result.score for result in outcome.all_results] == [6, 5, 7]
    assert session.run("x").result() == 2


def test_one_at_a_time(session: Session) -> None:
    code = "import os, time\nfree = not os.path.exists('/tmp/busy')\nopen('/tmp/busy', 'w').close(); time.sleep(0.05); os.remove('/tmp/busy')\n(free, 1)"
    outcome = BestOfN([code] * 3, session=session, max_parallel=1)()
    assert all(result.success for result in outcome.all_results)


REFUSED: dict[str, dict[str, Any]] = {
    "commit": {"commit": False},
    "setup": {"setup": bool},
    "isolation": {"isolate_processes": True},
    "resource_limits": {"resource_limits": None, "hide": ["x"]},
    "only": {"only": ["*.py"]},
    "keep_failed": {"keep_failed": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_of_branches_are_refused(session: Session, name: str) -> None:
    with pytest.raises(TypeError, match="cannot be combined with session"):
        BestOfN(["True"], session=session, **REFUSED[name])


def test_a_workspace_is_given_either_to_the_session_or_to_the_call(
    session: Session, real_workspace: Workspace
) -> None:
    with pytest.raises(TypeError, match="the session has its workspace"):
        Speculate(["True"], session=session)(real_workspace)
    with pytest.raises(TypeError, match="a workspace is needed"):
        Speculate([bool])()
    with pytest.raises(TypeError, match="is not callable"):
        Speculate(["True"])  # code needs a session


def test_a_session_that_cannot_fork_says_why(session: Session) -> None:
    session.run("import subprocess; p = subprocess.Popen(['sleep', '300'])")
    with pytest.raises(MemoryBranchError, match="a running child process"):
        Speculate(["True"], session=session)()
    until(lambda: session.run("1").result() == 1, "it goes on")


@pytest.mark.parametrize("pattern", [BestOfN, Speculate])
def test_a_pattern_in_a_session_can_be_awaited(session: Session, pattern: Any) -> None:
    outcome = asyncio.run(pattern(["data.append(5)\nTrue"], session=session).run_async())
    assert outcome.committed
    assert session.run("data").result() == [3, 1, 2, 5]


@pytest.mark.parametrize("pattern", [BestOfN, Speculate])
def test_a_cancelled_pattern_drops_its_children_and_the_session_continues(
    session: Session, pattern: Any
) -> None:
    code = f"""
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
open('started', 'w').close()
time.sleep({LONG})
"""

    async def cancelled() -> None:
        task = asyncio.create_task(pattern([code, code], session=session).run_async())

        def have_started() -> bool:
            children = session.children
            return len(children) == 2 and all(
                (c.branch.path / "started").exists() for c in children
            )

        await asyncio.to_thread(until, have_started, "both run")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not session.is_forked
    assert session.run("data, open('log').read()").result() == ([3, 1, 2], "")


def test_a_pattern_without_a_session_needs_a_workspace_to_be_awaited() -> None:
    with pytest.raises(TypeError, match="a workspace is needed"):
        asyncio.run(BestOfN([lambda path: True]).run_async())
