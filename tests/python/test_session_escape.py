"""The attempts of `test_escape`, from a forked child of a session."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.sandboxed_branch import WorkspacePair
from test_escape import PYTHON, SHELL

from branching import Child, Session
from branching.process.sandbox import parent_state

SECRET = "a sibling's secret"


@dataclass
class Attempts:
    """A forked child, and what the attempts know of the outside."""

    child: Child
    words: dict[str, str]

    def run(self, code: str) -> str:
        """Returns what code has printed in the child; a fork of the code ends there."""
        names = "\n".join(f"{name} = {value!r}" for name, value in self.words.items())
        cell = self.child.run(f"{names}\n{code}", timeout=100)
        assert cell.exception is None, cell.exception.__cause__
        return cell.stdout + cell.stderr


@pytest.fixture
def attempts(
    pair: WorkspacePair, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Attempts]:
    if pair.is_namespaced:  # what somebody who is not root gets
        monkeypatch.setattr(parent_state, "_may_make_namespaces", lambda _: False)
    outsider = subprocess.Popen(["sleep", "600"])
    words = {
        "BASE": str(pair.base),
        "ROOT": str(pair.root),
        "SIBLING": str(pair.sibling.path),
        "CONTROL": os.fsdecode(os.getxattr(pair.root, "user.branchfs.control")),
        "OTHER_BASE": str(pair.other_base),
        "OTHER_ROOT": str(pair.other_root),
        "OTHER_CONTROL": os.fsdecode(os.getxattr(pair.other_root, "user.branchfs.control")),
        "OUTSIDER": str(outsider.pid),
        "TEST": str(os.getpid()),
        "SOCKET": f"{outside}/socket",
        "QUEUE": "4711",
    }
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as named,
        ExitStack() as stack,
    ):
        listener.bind(f"\0branching-test-{os.getpid()}")
        listener.listen()
        named.bind(words["SOCKET"])
        named.listen()
        Path(words["SOCKET"]).chmod(0o777)
        session = stack.enter_context(Session(pair.space))
        children = session.fork(2)
        children[1].run("open('secret-of-the-other', 'w').close()")
        yield Attempts(children[0], words)
        session.abort()
    ended = outsider.poll()
    outsider.kill()
    outsider.wait()
    assert ended is None, "a process outside was ended"
    assert sorted(path.name for path in pair.base.iterdir()) == [".branching", "seed.txt"]
    assert (pair.base / "seed.txt").read_text() == "seed\n"
    assert (pair.sibling.path / "secret").read_text() == SECRET


@pytest.mark.parametrize("name", SHELL)
def test_no_command_gets_out_of_a_child(attempts: Attempts, name: str) -> None:
    names = "".join(f"{name}={shlex.quote(value)}\n" for name, value in attempts.words.items())
    script = names + SHELL[name]
    said = attempts.run(f"import os; os.system({script!r})")
    assert "ESCAPED" not in said, said


@pytest.mark.parametrize("name", PYTHON)
def test_no_code_gets_out_of_a_child(attempts: Attempts, name: str) -> None:
    said = attempts.run(PYTHON[name])
    assert "ESCAPED" not in said, said
