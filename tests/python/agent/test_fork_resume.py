"""`branching fork`: a fork whose command was killed, or whose merge was refused, goes on.

The command is a real process, and dies by SIGKILL.
"""

from __future__ import annotations

import re
import signal

import pytest
from conftest import NAME_FROM, Mounted
from support.command import Done, Running
from support.command import branching as branching_process
from support.forks import branch_with, called, until

from branching import Workspace
from branching.agent.fork_store import SQLiteForkStateStore
from branching.runlog.control_socket import is_alive
from branching.runlog.run_log import read_entries

CUT_OFF = "[ -e go ] && touch again || { touch half; sleep 3600; }"


def killed(real: Mounted, *words: str) -> str:
    """Runs a fork of two branches, one of which is done when the command is killed; its id."""
    words = (*words, "-c", "echo 0 > made; echo said", "-c", CUT_OFF)
    run = Running(real.root, ["fork", "-q", *words])
    branch_with(real.root, "made", run)
    branch_with(real.root, "half", run)
    try:
        until(lambda: "done" in _states(real), "the first is done")
    except AssertionError as error:
        run.signal(signal.SIGABRT)  # it says where its threads are
        raise AssertionError(f"{error}; {_states(real)}\n{run.done().err}") from error
    run.signal(signal.SIGKILL)
    run.done()
    return left(real)


def _states(real: Mounted) -> list[str]:
    with Workspace(real.root) as space:
        store = SQLiteForkStateStore.beside(space)
        states = [branch.status.state for each in store.list_all() for branch in each.branches]
        store.close()
    return [*states]


def left(real: Mounted) -> str:
    """The id of the fork that `ls` says was left."""
    said = called(real.root, "ls").err
    found = re.search(r"note: fork (\w+) is open, and no command is running it", said)
    assert found, said
    return found[1]


def nothing_is_left(real: Mounted) -> None:
    with Workspace(real.root) as space:
        assert not space.branches()
    assert called(real.root, "ls").err == ""
    (real.root / "free").touch()  # what was forked is not frozen any more
    agents = real.base / ".branching" / "agents"
    assert not list(agents.glob("fork-*"))


def resumed(real: Mounted, fork_id: str, *words: str) -> Done:
    return called(real.root, "fork", "--json", "--resume", fork_id, *words)


def test_a_killed_one_continues_with_the_finished_branches(real: Mounted) -> None:
    fork_id = killed(real)
    done = branching_process(real.root, "fork", "--json", "--resume", fork_id)
    assert done.code == 0, done.err
    facts = done.document
    assert (facts["fork"], facts["winner"], facts["applied"]) == (fork_id, "0", ["made"])
    assert [each["state"] for each in facts["branches"]] == ["done", "terminated"]
    assert not (real.root / "half").exists()
    nothing_is_left(real)
    log = called(real.root, "log", "--json").document["candidates"]
    assert [(entry["command"], entry["state"]) for entry in log] == [
        ("fork", "won"),
        ("fork", "terminated"),
    ]
    assert called(real.root, "log", log[0]["branch"]).out == "said\n", "of the killed command"


def test_an_interrupted_branch_runs_again_and_the_choice_stays(real: Mounted) -> None:
    """The killed command's judge chooses. Branches start from the files of the fork."""
    fork_id = killed(real, "--test-command", "test -e again")
    (real.base / "go").touch()
    done = resumed(real, fork_id, "--rerun")
    assert done.code == 0, done.err
    assert (done.document["winner"], done.document["applied"]) == ("1", ["again"])
    assert done.document["branches"][0]["tests"]["ratio"] == 0.0
    nothing_is_left(real)


def test_another_choice_takes_the_place_of_the_first(real: Mounted) -> None:
    """A choice that fails leaves the fork open."""
    fork_id = killed(real, "--pick", "1")
    done = called(real.root, "fork", "--resume", fork_id)
    assert done.code == 1
    assert "--rerun" in done.out
    assert left(real) == fork_id
    assert resumed(real, fork_id, "--pick", "2").code == 125
    assert resumed(real, fork_id, "--judge", "echo 0").code == 0
    assert (real.root / "made").exists()
    nothing_is_left(real)


def test_one_that_was_left_is_dropped(real: Mounted) -> None:
    fork_id = killed(real)
    done = called(real.root, "fork", "-c", "true")
    assert f"--drop {fork_id}" in done.err, "the next fork names it"
    assert done.code == 0
    assert called(real.root, "fork", "--drop", fork_id).err == f"✓ dropped fork {fork_id}\n"
    assert sorted(path.name for path in real.root.iterdir()) == [NAME_FROM]
    nothing_is_left(real)
    again = called(real.root, "fork", "--drop", fork_id)
    assert again.code == 125
    assert "there is no fork" in again.err


def test_one_that_runs_is_not_taken(real: Mounted) -> None:
    """Its runs continue."""
    script = "touch begun; until [ -e go ]; do sleep 0.05; done"
    run = Running(real.root, ["fork", "-q", "-c", script])
    branch = branch_with(real.root, "begun", run)
    fork_id = branch.name.rpartition("-")[0].removeprefix("@")
    assert called(real.root, "ls").err == "", "it is attended"
    for what in ("--resume", "--drop"):
        done = called(real.root, "fork", what, fork_id)
        assert done.code == 125
        assert "another `branching fork` is running this fork" in done.err
    (branch / "go").touch()
    assert run.done().code == 0
    nothing_is_left(real)


def test_a_fork_whose_branches_were_dropped_is_forgotten(real: Mounted) -> None:
    fork_id = killed(real)
    with Workspace(real.root) as space:
        for record in reversed(space.branches()):
            space.reopen(record.name).abort()
    done = resumed(real, fork_id)
    assert done.code == 125
    assert "are gone" in done.err
    nothing_is_left(real)


@pytest.mark.parametrize("refusal", ["judge", "conflict"])
def test_a_merge_that_is_refused_can_be_made_later(real: Mounted, refusal: str) -> None:
    """A judge that fails does not drop branches, whose work may have been expensive."""
    if refusal == "judge":
        done = called(real.root, "fork", "-c", "echo 1 > made", "--judge", "false")
    else:
        script = "echo 1 > made; touch begun; until [ -e go ]; do sleep 0.05; done; rm go begun"
        run = Running(real.root, ["fork", "-q", "--on-conflict", "fail", "-c", script])
        branch = branch_with(real.root, "begun", run)
        (real.base / "made").write_text("others\n")
        (branch / "go").touch()
        done = run.done()
    assert done.code == 125
    fork_id = left(real)
    assert f"branching fork --resume {fork_id}" in done.err
    done = resumed(real, fork_id, "--pick", "0", "--on-conflict", "theirs")
    assert done.code == 0, done.err
    assert (real.root / "made").read_text() == "1\n"
    nothing_is_left(real)


def test_a_signal_leaves_what_was_taken_up(real: Mounted) -> None:
    """A resumed fork has already cost money: only `--drop` drops it."""
    fork_id = killed(real)
    run = Running(real.root, ["fork", "-q", "--resume", fork_id, "--rerun"])
    logs = real.base / ".branching" / "logs"
    until(
        lambda: any(
            entry.state == "running" and is_alive(logs / entry.door) for entry in read_entries(logs)
        ),
        "it runs again",
    )
    run.signal(signal.SIGTERM)
    assert run.done().code == 128 + signal.SIGTERM
    assert left(real) == fork_id
    assert resumed(real, fork_id).code == 0
    nothing_is_left(real)


def test_where_nothing_can_be_kept_a_fork_runs_all_the_same(real: Mounted) -> None:
    """And says what it is without."""
    done = called(real.root, "fork", "-c", "touch first")
    database = real.base / ".branching" / "agents" / "forks.sqlite"
    for path in database.parent.iterdir():
        path.unlink()
    database.write_bytes(b"no database at all, but long enough to be looked at" * 50)
    done = called(real.root, "fork", "-c", "touch made")
    assert done.code == 0
    assert "this fork cannot be resumed if its command is killed" in done.err
    assert (real.root / "made").exists()
    assert "cannot be opened" in resumed(real, "1a2b3c4d").err
    assert called(real.root, "ls").code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--resume", "x", "--drop", "x"],
        ["--rerun", "-c", "true"],
        ["--resume", "x", "-c", "true"],
        ["--resume", "x", "--timeout", "1"],
        ["--resume", "x", "--budget-usd", "1"],
        ["--drop", "x", "--pick", "0"],
    ],
    ids=str,
)
def test_invalid_options_are_a_usage_error(real: Mounted, words: list[str]) -> None:
    assert called(real.root, "fork", *words).code == 2


def test_a_fork_of_another_program_is_left_alone(real: Mounted) -> None:
    done = called(real.root, "fork", "--resume", "1a2b3c4d")
    assert done.code == 125
    assert "open forks: none" in done.err
