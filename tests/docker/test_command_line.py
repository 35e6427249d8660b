"""The wrapper's own messages and exit codes, without a running container."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from branching.cli.app import app as branching
from branching_docker import __version__
from branching_docker.cli import app
from branching_docker.commands import FORWARDED_COMMANDS
from branching_docker.constants import OWN_COMMANDS
from branching_docker.engine import unreachable
from branching_docker.errors import EngineError
from branching_docker.host_files import HOST_FILES
from branching_docker.inner import commands
from conftest import ROOT, WRAPPER


def wrapper(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the wrapper as a user would."""
    return subprocess.run(
        [WRAPPER, *arguments], env=os.environ | environ, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_the_version_is_printed() -> None:
    """Without an engine, only the version of the wrapper."""
    told = wrapper("--version", PATH=str(WRAPPER.parent))
    assert (told.returncode, told.stdout) == (0, f"branching-docker {__version__}\n")


def test_root_in_a_directory_of_another_owner_is_warned_of(tmp_path: Path) -> None:
    """In a branch root has no capabilities, so that owner's files are closed to it."""
    warning = "they can write only where all users can"
    assert warning not in wrapper("-w", tmp_path, "--root", "--dry-run", "run", "true").stderr
    os.chown(tmp_path, 12345, 12345)
    words = ("--dry-run", "run", "true")
    assert f"{tmp_path} belongs to user 12345: {warning}" in wrapper("-w", tmp_path, "--root", *words).stderr
    assert warning not in wrapper("-w", tmp_path, *words).stderr
    assert "it can write only where all users can" in " ".join(wrapper("--help").stdout.split())


@pytest.mark.parametrize(("kind", "chosen"), [("an environment", "python3"), ("a directory of many", "pip's own")])
def test_the_python_beside_the_command_counts_in_an_environment_alone(tmp_path: Path, kind: str, chosen: str) -> None:
    """In ~/.local/bin and /usr/local/bin there may be one that knows nothing of us."""
    here = tmp_path / "e" / "bin"
    here.mkdir(parents=True)
    shutil.copy(ROOT / "branching-docker" / "bin" / "branching-docker", here)
    for name, says in (("python3", "python3"), ("branching-docker-python", "pip's own")):
        (here / name).write_text(f'#!/bin/sh\necho "{says}"\n')
        (here / name).chmod(0o755)
    if kind == "an environment":
        (tmp_path / "e" / "pyvenv.cfg").touch()
    (tmp_path / "link").symlink_to(here / "branching-docker")
    for command in (here / "branching-docker", tmp_path / "link"):
        assert subprocess.run([command], capture_output=True, text=True).stdout == f"{chosen}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_lists_the_possible_words(shell: str) -> None:
    """As the script asks that `completion` prints."""
    assert "_BRANCHING_DOCKER_COMPLETE" in wrapper("completion", shell).stdout
    line = "branching-docker do"
    asked = {"COMP_WORDS": line, "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": line}
    told = wrapper(_BRANCHING_DOCKER_COMPLETE=f"complete_{shell}", _TYPER_COMPLETE_FISH_ACTION="get-args", **asked)
    assert "down" in told.stdout
    assert "doctor" in told.stdout


@pytest.mark.contract("7.7")
@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"], *([name, "--help"] for name in OWN_COMMANDS)])
def test_help_succeeds(arguments: list[str]) -> None:
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0
    assert "Usage" in told.stdout


@pytest.mark.parametrize("command", FORWARDED_COMMANDS)
def test_the_help_of_every_command_needs_no_directory_and_no_engine(command: str) -> None:
    told = wrapper(command, "--help", PATH=str(WRAPPER.parent))
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.startswith(f"Usage: branching-docker -w DIR {command} ")
    assert f"Example: branching-docker -w DIR {command}" in told.stdout
    assert f"\n  {command} " in wrapper("--help").stdout


def test_the_table_of_commands_is_that_of_the_image() -> None:
    """But for the two that the wrapper has itself."""
    inner = {str(command.name) for command in branching.registered_commands}
    assert set(commands()) == inner
    assert set(FORWARDED_COMMANDS) == inner - set(OWN_COMMANDS)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("branching-docker -w . run --on-s", "--on-success"),
        ("branching-docker -w . load fix --fo", "--force"),
        ("branching-docker best", "best-of-n"),
        ("branching-docker -w . run -- ls --js", ""),
        ("branching-docker -w . run ls --js", ""),
    ],
)
def test_the_tab_key_completes_the_options_of_the_images_commands(line: str, told: str) -> None:
    """Not among the words of a user's own command."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    assert wrapper(_BRANCHING_DOCKER_COMPLETE="complete_bash", **asked).stdout.strip() == told


@pytest.mark.parametrize(
    "arguments",
    [
        ["-w"],
        ["-w", "", "run", "true"],
        ["-w", ".", "Frobnicate!"],
        ["--nonsense", "-w", ".", "run"],
    ],
    ids=[
        "-w without a value",
        "-w of a variable that was not set",
        "no command's name",
        "no such option",
    ],
)
def test_a_usage_error_is_2_on_standard_error(arguments: list[str]) -> None:
    told = wrapper(*arguments)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr


@pytest.mark.parametrize("command", [["run", "true"], ["up"]])
def test_without_w_the_directory_is_the_current_one(command: list[str], tmp_path: Path) -> None:
    told = subprocess.run(
        [WRAPPER, "--dry-run", *command],
        cwd=tmp_path,
        env=os.environ | {"PATH": str(WRAPPER.parent)},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert f"type=bind,src={tmp_path.resolve()},dst=/src" in shlex.split(told.stdout)


@pytest.mark.parametrize("command", [*sorted(set(FORWARDED_COMMANDS) - set(HOST_FILES)), "one-that-is-newer-than-us"])
def test_dry_run_prints_what_would_run_and_needs_no_docker(command: str, tmp_path: Path) -> None:
    told = wrapper("-w", tmp_path, "--dry-run", command, "-q", "--", "x y", "--", PATH=str(WRAPPER.parent))
    words = shlex.split(told.stdout)
    assert told.returncode == 0
    assert words[:2] == ["docker", "run"]
    assert words[-5:] == [command, "-q", "--", "x y", "--"]


@pytest.mark.parametrize(
    ("directory", "message"), [("/nowhere", "cannot be used"), ("/etc/hostname", "is not a directory")]
)
def test_a_bad_directory_is_125_with_a_hint(directory: str, message: str) -> None:
    told = wrapper("-w", directory, "run", "true")
    assert told.returncode == 125
    assert message in told.stderr
    assert "\nHint: " in told.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["--dry-run", "-w", "/tmp", "run", "true"]], ids=["help", "dry run"])
def test_an_output_that_takes_nothing_is_125_and_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        told = subprocess.run([WRAPPER, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert told.returncode == 125
    assert told.stderr.startswith("branching-docker: the system refused an operation.\nCause: [Errno 28]")


def test_a_missing_docker_is_named(tmp_path: Path) -> None:
    told = wrapper("-w", tmp_path, "run", "true", PATH=str(WRAPPER.parent))
    assert told.returncode == 125
    assert "docker command is not installed" in told.stderr
    assert "\nHint: install Docker" in told.stderr


def test_a_stopped_engine_is_named(tmp_path: Path) -> None:
    told = wrapper("-w", tmp_path, "run", "true", DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    assert told.returncode == 125
    assert f"does not answer at unix://{tmp_path}/no.sock" in told.stderr
    assert "Cause: No such file or directory\nHint: start it" in told.stderr


def test_a_refusing_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket without a listener, as a killed daemon leaves it."""
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind("s")
    told = wrapper("-w", tmp_path, "run", "true", DOCKER_HOST=f"unix://{tmp_path}/s")
    assert told.returncode == 125
    assert "Cause: Connection refused" in told.stderr


def test_an_engine_on_another_machine_is_refused(tmp_path: Path) -> None:
    for host in ("ssh://user@far", "tcp://192.0.2.1:2375"):
        told = wrapper("-w", tmp_path, "run", "true", DOCKER_HOST=host)
        assert told.returncode == 125
        assert f"the engine that DOCKER_HOST names is on another machine ({host})" in told.stderr
        assert "\nHint: unset DOCKER_HOST, or " in told.stderr


def test_an_unknown_context_is_named(tmp_path: Path) -> None:
    told = wrapper("-w", tmp_path, "run", "true", DOCKER_CONTEXT="no-such-context", DOCKER_HOST="")
    assert told.returncode == 125
    assert "no-such-context" in told.stderr


def test_a_forbidden_socket_says_how_to_be_allowed() -> None:
    told = unreachable(PermissionError(13, "Permission denied"), "/var/run/docker.sock")
    assert isinstance(told, EngineError)
    assert told.message.startswith("permission denied: Docker")
    assert "usermod -aG docker" in told.hint


def test_build_names_a_tree_without_a_dockerfile(tmp_path: Path) -> None:
    told = wrapper("build", tmp_path)
    assert told.returncode == 125
    assert "has no Dockerfile" in told.stderr


def test_the_watcher_acts_when_its_pipe_closes_and_not_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker of our own notes what the watcher asks of it."""
    notes = tmp_path / "notes"
    fake = tmp_path / "docker"
    fake.write_text(f'#!/bin/sh\necho "$@" >>{shlex.quote(str(notes))}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    watch = "import os, time; from branching_docker.container_run import watch; "
    watch += "watch('it', image='that', command='docker', environ=os.environ); "
    client = subprocess.Popen(
        [sys.executable, "-c", f"{watch} print('watched', flush=True); time.sleep(60)"], stdout=-1
    )
    with client:
        assert client.stdout
        client.stdout.readline()
        time.sleep(0.3)  # long enough for a watcher that does not wait
        assert not notes.exists()
        client.kill()
    deadline = time.monotonic() + 60
    while not notes.exists() or notes.read_text() != "stop -t 60 it\nrm --force it\n":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_watcher_recovers_a_directory_whose_container_was_killed_in_a_commit(tmp_path: Path) -> None:
    """A docker of our own takes the entry out of the journal when it is run, at the second try."""
    fake = tmp_path / "docker"
    journal = tmp_path / "project" / ".branching" / "journal"
    journal.mkdir(parents=True)
    fake.write_text(
        f"""#!/bin/sh
[ "$1" = run ] || exit 0
case $* in *" --recover") ;; *) exit 1 ;; esac
[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; echo "not yet" >&2; exit 1; }}
rm -r {journal}/7; echo "the commit of x was finished"
"""
    )
    fake.chmod(0o755)
    watch = f"""
import os, pathlib
from branching_docker.container_run import watch
from branching_docker.engine_info import EngineInfo
from branching_docker.recovery import plan_recovery
from branching_docker.settings import Settings
plan = plan_recovery(pathlib.Path({str(journal.parents[1])!r}), settings=Settings(), info=EngineInfo())
watch("it", image="that", command={str(fake)!r}, environ=os.environ, recovery=plan)
"""
    # Standard error is open until the watcher has nothing to say any more.
    for entries, said in (
        ([], ""),
        (["7"], "the container was killed during a commit: the commit of x was finished.\n"),
    ):
        for entry in entries:
            (journal / entry).mkdir()
        client = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, timeout=60)
        assert client.stderr.removeprefix("branching-docker: ") == said
    assert list(journal.iterdir()) == []


@pytest.mark.parametrize("command", [["run", "true"], ["up"], ["exec", "true"]], ids=" ".join)
def test_a_directory_that_went_away_is_refused(tmp_path: Path, command: list[str]) -> None:
    """The caller's working directory was removed and has no path."""
    gone = tmp_path / "gone"
    gone.mkdir()
    words = 'rmdir "$PWD"; exec "$0" -w . "$@"'
    done = subprocess.run(["sh", "-c", words, WRAPPER, *command], cwd=gone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 125
    assert "branching-docker: -w . cannot be used.\n" in done.stderr  # the shell complains before us
    assert "Traceback" not in done.stderr


def test_the_help_lists_every_command_in_its_group() -> None:
    listed: dict[str, str] = {}
    title = ""
    for line in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
        elif title != "Options" and line.startswith("  ") and not line.startswith("   ") and "  " in line.strip():
            listed[line.split()[0]] = title
    forwarded = {name: commands()[name]["group"] for name in FORWARDED_COMMANDS}
    assert {name: title for name, title in listed.items() if name in forwarded} == forwarded
    assert {name: title for name, title in listed.items() if name not in forwarded} == {
        **dict.fromkeys(("recover", "up", "exec", "down"), "Container"),
        **dict.fromkeys(("init", "build", "pull", "doctor", "completion"), "Set up"),
    }
