"""Files that a command names are the host's: they are read and written there, by the caller, warm or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from typer.main import get_command

from branching.cli import cache_option
from branching.cli.app import app as branching
from branching_docker.errors import WorkspaceError
from branching_docker.fast_path import HOST_FILE_OPTIONS, NAMES_HOST_FILES
from branching_docker.host_files import HOST_FILES, KEYS_OF_HOME, extract_host_file
from conftest import WRAPPER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from project_snapshot import Project

    Run = Callable[..., subprocess.CompletedProcess[bytes]]

RUN_SECONDS = 180


def test_every_parameter_of_the_commands_that_names_a_file_is_known() -> None:
    """By the placeholder FILE, which a parameter of that kind has in the help."""
    found: dict[str, tuple[str, ...] | int] = {}
    for name, command in get_command(branching).commands.items():  # type: ignore[attr-defined]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        for each in command.params:
            if "FILE" in (each.metavar or ""):
                is_argument = each.param_type_name == "argument"
                found[name] = arguments.index(each) if is_argument else tuple(each.opts)
    assert found == HOST_FILES
    by_option = {name for name, where in HOST_FILES.items() if where == ("--report",)}
    assert set(NAMES_HOST_FILES) == set(HOST_FILES) - by_option
    assert "--report" in HOST_FILE_OPTIONS


def test_a_cache_may_not_be_in_the_same_directories_of_a_home_as_without_the_wrapper() -> None:
    assert KEYS_OF_HOME == cache_option.KEYS_OF_HOME


@pytest.mark.parametrize(
    ("words", "inside", "streams"),
    [
        ("export b -o fix.tar", "export b", {"writes": "fix.tar"}),
        ("export -ofix.tar b", "export b", {"writes": "fix.tar"}),
        ("export --output=../fix.tar b", "export b", {"writes": "../fix.tar"}),
        ("export b -o one -o two", "export b", {"writes": "two"}),
        ("export b -o -", "export b -o -", {}),
        ("export b", "export b", {}),
        ("export b -o", "export b -o", {}),
        ("export -- -o x", "export -- -o x", {}),
        ("load b fix.tar", "load b", {"reads": "fix.tar"}),
        ("load --force b --json fix.tar", "load --force b --json", {"reads": "fix.tar"}),
        ("load -w /workspace b fix.tar", "load -w /workspace b", {"reads": "fix.tar"}),
        ("load -- b -fix.tar", "load -- b", {"reads": "-fix.tar"}),
        ("load b -", "load b -", {}),
        ("load b", "load b", {}),
        ("run -- export b -o fix.tar", "run -- export b -o fix.tar", {}),
        ("diff b fix.tar", "diff b fix.tar", {}),
    ],
)
def test_the_file_is_taken_out_of_the_containers_words(words: str, inside: str, streams: dict[str, str]) -> None:
    call = extract_host_file(words.split())
    assert call.words == inside.split()
    assert {"reads": call.reads, "writes": call.writes, "variables": call.variables} == {
        "reads": None,
        "writes": None,
        "variables": {},
        **streams,
    }


def test_a_report_and_caches_are_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("home/.cargo", "home/.ssh", "link"):
        (tmp_path / name).mkdir(parents=True)
    call = extract_host_file(["speculate", "--report", "race.html", "--cache", "link", "-c", "true"])
    assert (call.report, call.caches) == ("race.html", (str(tmp_path / "link"),))
    assert call.words == ["speculate", "--report", "race.html", "--cache", str(tmp_path / "link"), "-c", "true"]
    assert call.report_words[-1] == call.variables["BRANCHING_REPORT"]
    call = extract_host_file(["run", "--cache=~/.cargo", "--", "x", "--cache", "y"])
    assert call.words == ["run", f"--cache={tmp_path}/home/.cargo", "--", "x", "--cache", "y"]
    for cache, why in (("~", "home"), ("/", "home"), ("~/.ssh", "keys"), ("none", "no such directory")):
        with pytest.raises(WorkspaceError, match=why):
            extract_host_file(["run", "--cache", cache, "--", "true"])
    for report in ("link", "none/race.html"):
        with pytest.raises(WorkspaceError, match="--report"):
            extract_host_file(["best-of-n", "--report", report, "--", "true"])


def test_the_document_of_an_export_is_printed_beside_the_archive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The container's standard output is the archive. A failure has no document here, and leaves no file."""
    archive = tmp_path / "fix.tar"
    call = extract_host_file(["export", "--json", "fix", "-o", str(archive)])
    assert call.words == ["export", "--json", "fix"]
    assert call.run(lambda: 0 * os.write(1, b"archive")) == 0
    assert archive.read_bytes() == b"archive"
    assert json.loads(capfd.readouterr().out) == {
        "version": 1,
        "command": "export",
        "branch": "fix",
        "output": str(archive),
        "bytes": 7,
    }
    archive.unlink()
    assert call.run(lambda: 125) == 125
    assert (capfd.readouterr().out, archive.exists()) == ("", False)


def test_a_token_is_read_on_the_host_and_only_if_it_is_private(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    call = extract_host_file(["mcp", "--http", "0", "--token-file", str(file)])
    assert (call.words, call.variables) == (["mcp", "--http", "0"], {"BRANCHING_MCP_TOKEN": "0123456789abcdef"})
    file.chmod(0o640)
    with pytest.raises(WorkspaceError, match="other users can read"):
        extract_host_file(["mcp", "--token-file", str(file)])
    with pytest.raises(WorkspaceError, match="cannot be used"):
        extract_host_file(["mcp", "--token-file", str(tmp_path / "none")])


def test_a_dry_run_prints_the_redirection_and_opens_nothing(tmp_path: Path) -> None:
    words = ["--dry-run", "export", "b", "-o", f"{tmp_path}/it's.tar"]
    done = subprocess.run([WRAPPER, "-w", tmp_path, *words], capture_output=True, text=True)
    assert done.stdout.endswith(f""" export b > '{tmp_path}/it'"'"'s.tar'\n"""), done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(params=["cold", "warm"])
def run(request: pytest.FixtureRequest, image: str, project: Project, tmp_path: Path) -> Iterator[Run]:
    """Runs the wrapper in a directory beside the project, which has an open branch `fix`."""
    beside = tmp_path / "beside"
    beside.mkdir()

    def call(*arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        command = [str(WRAPPER), "--image", image, "-w", str(project.root), *arguments]
        return subprocess.run(command, cwd=beside, capture_output=True, input=content, timeout=RUN_SECONDS)

    if request.param == "warm":
        assert call("up").returncode == 0
    made = call("run", "-b", "fix", "--on-success", "keep", "--", "sh", "-c", "echo new >new.txt")
    assert made.returncode == 0, made.stderr
    yield call
    for branch in ("fix", "again"):
        call("abort", branch)
    call("down")


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_report_a_cache_and_the_callers_directory_are_those_of_the_host(
    image: str, project: Project, tmp_path: Path, is_warm: bool
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, project.owner, project.owner)
    report = tmp_path / "race.html"
    report.write_text("an older one")

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(WRAPPER), "--image", image, "-w", str(project.root), *words]
        return subprocess.run(command, cwd=project.root / "sub", capture_output=True, text=True, timeout=RUN_SECONDS)

    if is_warm:
        assert call("-v", f"{cache}:{cache}", "up").returncode == 0
    try:
        race = ("-c", f"touch {cache}/filled; exit 3", "-c", "pwd; exit 4")
        done = call("speculate", "--report", str(report), "--cache", str(cache), *race)
        assert done.returncode == 1, done.stderr
        assert "/workspace/sub" in done.stdout + done.stderr
        page = report.read_text()
        assert "exit 4" in page
        assert "an older one" not in page
        assert (cache / "filled").exists()
        assert [path.name for path in tmp_path.glob("race.html*")] == ["race.html"]
        assert not list(project.root.rglob("report-*"))
        if is_warm:
            refused = call("run", "--cache", str(report.parent / "project"), "--", "true")
            assert refused.returncode != 0
            assert "was made without the cache" in refused.stderr
        call("prune")
    finally:
        call("down")


def test_an_archive_goes_to_a_file_of_the_host_and_comes_from_one(run: Run, project: Project, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    archive = beside / "fix.tar"
    done = run("export", "fix", "-o", "fix.tar")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    with tarfile.open(archive) as opened:
        assert "new.txt" in [name.removeprefix("./") for name in opened.getnames()]
    assert (archive.stat().st_uid, archive.stat().st_mode & 0o777) == (os.getuid(), 0o666 & ~umask())
    assert (done := run("load", "again", "./fix.tar")).returncode == 0, done.stderr
    assert run("diff", "again").stdout.startswith(b"A new.txt")
    content = archive.read_bytes()
    done = run("export", "fix", "-o", "-")
    assert (done.returncode, len(done.stdout)) == (0, len(content))
    assert run("abort", "again").returncode == 0
    assert run("load", "again", "-", content=content).returncode == 0
    assert not (project.root / "-").exists()
    assert [path.name for path in beside.iterdir()] == ["fix.tar"]


def test_a_file_that_is_there_is_not_replaced_and_a_failure_leaves_none(run: Run, tmp_path: Path) -> None:
    there = tmp_path / "beside" / "there.tar"
    there.write_text("precious")
    done = run("export", "fix", "-o", "there.tar")
    assert (done.returncode, there.read_text()) == (125, "precious")
    assert b"the file there.tar cannot be used.\nCause: File exists\nHint: name a new file" in done.stderr
    assert run("export", "no-such-branch", "-o", "none.tar").returncode == 125
    done = run("load", "again", "nowhere.tar")
    assert done.returncode == 125
    assert b"the file nowhere.tar cannot be used.\nCause: No such file" in done.stderr
    assert [path.name for path in there.parent.iterdir()] == ["there.tar"]


def test_a_signal_ends_an_export_and_leaves_no_half_of_a_file(image: str, project: Project, tmp_path: Path) -> None:
    """A branch too large to be written before the signal comes."""
    command = [str(WRAPPER), "--image", image, "-w", str(project.root)]
    keep = [*command, "run", "-b", "fix", "--on-success", "keep", "--", "sh", "-c"]
    subprocess.run([*keep, "head -c 300000000 /dev/urandom >big"], check=True, capture_output=True)
    archive = tmp_path / "big.tar"
    client = subprocess.Popen([*command, "export", "fix", "-o", str(archive)], stderr=subprocess.PIPE)
    with client:
        while not (archive.exists() and archive.stat().st_size > 1 << 20):
            assert client.poll() is None, client.stderr and client.stderr.read()
        while client.poll() is None:  # the first may end it as it does outside of a container; the second insists
            client.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                client.wait(timeout=2)
    # With a signal that comes too late the archive is whole, and the exit code says so.
    assert archive.exists() == (client.returncode == 0)
    subprocess.run([*command, "abort", "fix"], check=True, capture_output=True)


def umask() -> int:
    """Returns this process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
