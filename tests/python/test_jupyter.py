"""The Jupyter kernel: notebooks that nbclient runs, as Jupyter does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from typer.testing import CliRunner, Result

from branching import Workspace
from branching.cli.app import app

SECONDS_MAX = 240

pytestmark = [  # the clients leave the closing of their sockets to the garbage collector
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def directory(outside: Path) -> Path:
    made = outside / "project"
    made.mkdir()
    (made / "seed.txt").write_text("seed\n")
    return made


def run_cli(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.fixture
def registered(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the kernel, as `branching kernel install` registers it."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "run"))
    done = run_cli("kernel", "install", "--workspace", str(directory), "--name", "forks")
    assert done.exit_code == 0, done.stderr
    return "forks"


def notebook(*cells: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def texts(cell: Any) -> list[str]:
    """Returns what a cell shows: streams, values, and names of errors."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        shown.append(output.get("text") or data.get("text/plain") or output.get("ename"))
    return [text.strip() for text in shown]


def test_a_notebook_forks_a_cell_into_three_and_keeps_one(directory: Path, registered: str) -> None:
    book = notebook(
        "data = [1, 2, 3]\nprint('loaded')\nlen(data)",
        "%%fork 3\nfactor = child_index + 1\nopen('best.txt', 'w').write(str(factor))\n[factor * n for n in data]",
        "%child 1\n%diff",
        "%pick 2",
        "factor, open('best.txt').read()",
        "%fork 2\ndata.append('lost'); open('best.txt', 'w').write('lost')",
        "%back",
        "data, open('best.txt').read()",
        "from IPython.display import HTML, display\ndisplay(HTML('<b>bold</b>'))",
        "import asyncio\nawait asyncio.sleep(0, 'awaited')",
        "%commit",
    )
    NotebookClient(book, kernel_name=registered, timeout=SECONDS_MAX).execute()
    assert [texts(cell) for cell in book.cells] == [
        ["loaded", "3"],
        [
            "3 children; code runs in child 0 now",
            *("child 0:", "[1, 2, 3]"),
            *("child 1:", "[2, 4, 6]"),
            *("child 2:", "[3, 6, 9]"),
        ],
        ["A best.txt"],
        ["child 2 is the session now\nA best.txt"],
        ["(3, '3')"],
        ["2 children; code runs in child 0 now", "4"],
        [],
        ["([1, 2, 3], '3')"],
        ["<IPython.core.display.HTML object>"],
        ["'awaited'"],
        ["A best.txt"],
    ]
    assert book.cells[8].outputs[0]["data"]["text/html"] == "<b>bold</b>"
    assert (directory / "best.txt").read_text() == "3"
    with Workspace.open(directory) as workspace:
        assert workspace.branches() == []


def test_errors_are_those_of_the_cell_and_the_kernel_continues(
    directory: Path, registered: str
) -> None:
    book = notebook(
        "x = 1\n1 / 0",
        "1 +",
        "%pick 1",
        "%fork many",
        "x = 2\n%fork 2",
        "import threading, time; t = threading.Thread(target=time.sleep, args=(600,), daemon=True); t.start()",
        "%fork 2",
        "x",
        "import os; os._exit(3)",
        "x",
    )
    NotebookClient(book, kernel_name=registered, timeout=SECONDS_MAX, allow_errors=True).execute()
    errors = {
        number: (output["ename"], output["evalue"])
        for number, cell in enumerate(book.cells)
        for output in cell.outputs
        if output["output_type"] == "error"
    }
    assert errors[0] == ("ZeroDivisionError", "division by zero")
    assert errors[1][0] == "SyntaxError"
    assert errors[2] == ("UsageError", "there are no children; %fork N makes some")
    assert errors[3] == ("UsageError", "a number is missing: %fork 3")
    assert errors[4] == (
        "RuntimeError",
        "commands of the kernel must come before all code of a cell",
    )
    assert errors[6][0] == "MemoryBranchError"
    assert "running threads" in errors[6][1]
    assert texts(book.cells[7]) == ["2"]
    assert "has ended" in errors[8][1]
    assert "has ended" in errors[9][1]
    assert sorted(errors) == [0, 1, 2, 3, 4, 6, 8, 9]


@contextmanager
def connected(name: str) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name=name)
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=SECONDS_MAX)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
        manager.cleanup_resources()


def test_names_are_completed_and_documented_and_code_is_interrupted(
    registered: str,
) -> None:
    with connected(registered) as (manager, client):
        client.execute_interactive("long_name = {'key': 1}", timeout=SECONDS_MAX)
        found = client.complete("x = 1\nlong_n", reply=True, timeout=SECONDS_MAX)["content"]
        assert found["matches"] == ["long_name"]
        assert (found["cursor_start"], found["cursor_end"]) == (6, 12)
        about = client.inspect("long_name", reply=True, timeout=SECONDS_MAX)["content"]
        assert about["found"]
        assert "dict" in about["data"]["text/plain"]
        client.is_complete("for x in y:")
        whole = client.get_shell_msg(timeout=SECONDS_MAX)["content"]
        assert whole == {"status": "incomplete", "indent": "    "}

        shown: list[str] = []

        def interrupt(message: Any) -> None:
            if message["msg_type"] == "stream":
                shown.append(message["content"]["text"])
                if "begun" in "".join(shown):
                    manager.interrupt_kernel()

        reply = client.execute_interactive(
            "print('begun')\nimport time\ntime.sleep(600)",
            output_hook=interrupt,
            timeout=SECONDS_MAX,
        )["content"]
        assert reply["ename"] == "KeyboardInterrupt"
        reply = client.execute_interactive("long_name['key']", timeout=SECONDS_MAX)["content"]
        assert reply["status"] == "ok"


def test_files_that_are_not_committed_stay_in_a_branch(directory: Path, registered: str) -> None:
    with Workspace.open(directory) as workspace:
        with connected(registered) as (_, client):
            client.execute_interactive("open('made', 'w').write('x')", timeout=SECONDS_MAX)
        [branch] = [each.name for each in workspace.branches()]
        assert not (directory / "made").exists()
        workspace.reopen(branch).abort()


def test_the_kernel_is_registered_for_the_user_or_for_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    done = run_cli("kernel", "install")
    written = tmp_path / "data/kernels/branching"
    assert (done.exit_code, str(written) in done.stderr) == (0, True)
    found = json.loads((written / "kernel.json").read_text())
    assert found["argv"] == [sys.executable, "-m", "branching.jupyter", "-f", "{connection_file}"]
    assert found["interrupt_mode"] == "message"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert run_cli("kernel", "install", "--sys-prefix").exit_code == 0
    assert (tmp_path / "env/share/jupyter/kernels/branching/kernel.json").exists()


def test_a_kernel_that_cannot_be_registered_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is not a directory" in run_cli("kernel", "install", "-w", str(tmp_path / "no")).stderr
    assert "write branching kernel install" in run_cli("kernel", "remove").stderr
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    done = run_cli("kernel", "install")
    assert 'pip install ".[jupyter]"' in done.stderr
