"""A warm container: commands in it behave as in one of their own, and it ends when it is idle."""

from __future__ import annotations

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from branching_docker.constants import WARM_LABEL, WORKSPACE_LABEL
from conftest import WRAPPER, labelled
from project_snapshot import Project
from terminal import read_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import docker

RUN_SECONDS = 180


def wrapper(
    project: Project, *arguments: str, input_text: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs the wrapper on a project."""
    return subprocess.run(
        [WRAPPER, "-w", project.root, *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        input=input_text,
        timeout=RUN_SECONDS,
    )


@contextmanager
def warm(project: Project, *options: str) -> Iterator[Project]:
    """A warm container on a project, ended at the end."""
    up = wrapper(project, *options, "up")
    assert up.returncode == 0, up.stderr
    try:
        yield project
    finally:
        down = wrapper(project, "down")
        assert down.returncode == 0, down.stderr


@pytest.fixture(scope="module", autouse=True)
def image_for_all(image: str) -> Iterator[None]:
    """The image under test is everybody's default here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BRANCHING_IMAGE", image)
        yield


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """One warm container for the tests that leave their project as it was."""
    root = tmp_path_factory.mktemp("warm")
    (root / "kept.txt").write_text("as it was\n")
    for path in (root, root / "kept.txt"):
        os.chown(path, 1000, 1000)
    with warm(Project(root, 1000)) as project:
        yield project


def test_commands_share_one_container(project: Project, engine: docker.DockerClient) -> None:
    with warm(project):
        assert wrapper(project, "up").returncode == 0  # again: it is the same
        for name in ("one", "two"):
            done = wrapper(project, "run", "--", "touch", name)
            assert done.returncode == 0, done.stderr
        assert [WARM_LABEL in one["Labels"] for one in mine(engine, project)] == [True]
        assert str(project.root) in subprocess.run([WRAPPER, "ls"], capture_output=True, text=True).stdout
    assert {(project.root / name).stat().st_uid for name in ("one", "two")} == {project.owner}


def test_ls_without_a_directory_lists_all_containers_and_the_branches_of_this_one(project: Project) -> None:
    with warm(project):
        done = wrapper(project, "run", "-b", "kept", "--on-success", "keep", "--", "touch", "new")
        assert done.returncode == 0, done.stderr
        done = subprocess.run([WRAPPER, "ls"], cwd=project.root, capture_output=True, text=True)
        containers, _, branches = done.stdout.partition("\n\n")
        assert (done.returncode, containers.splitlines()[-1].split()[-1]) == (0, str(project.root)), done.stderr
        assert "kept" in branches.split()
        machine_readable = subprocess.run([WRAPPER, "ls", "--json"], cwd=project.root, capture_output=True, text=True)
        assert [one["name"] for one in json.loads(machine_readable.stdout)["branches"]] == ["kept"]
        assert wrapper(project, "abort", "kept").returncode == 0


def test_a_command_that_comes_before_the_mount_waits_for_it(project: Project) -> None:
    """The container is there, and its mount is not: as if it took long."""
    planned = shlex.split(wrapper(project, "--dry-run", "up").stdout)
    slow = ["--detach", "--entrypoint", "sh"]
    program = 'sleep 2; exec tini -g -- branching-entrypoint "$@"'
    subprocess.run([*planned[:2], *slow, *planned[2:-2], "-c", program, "sh", *planned[-2:]], check=True)
    try:
        done = wrapper(project, "exec", "--", "test", "-e", "kept.txt")
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        assert wrapper(project, "down").returncode == 0


@pytest.mark.parametrize("code", [0, 7, 125, 137])
def test_the_exit_code_is_the_commands(shared: Project, code: int) -> None:
    for words in (("exec", "--", "sh", "-c", f"exit {code}"), ("exec", "sh", "-c", f"exit {code}")):
        assert wrapper(shared, *words).returncode == code
    assert wrapper(shared, "run", "--on-success", "abort", "--", "sh", "-c", f"exit {code}").returncode == code


def test_a_command_that_cannot_run_has_the_exit_code_for_it(shared: Project) -> None:
    assert wrapper(shared, "exec", "--", "no-such-command").returncode == 127
    assert wrapper(shared, "exec", "--", "./kept.txt").returncode == 126
    assert wrapper(shared, "exec", "--").returncode == 2
    assert wrapper(shared, "exec").returncode == 2


def test_exec_is_the_owner_without_privileges_and_with_a_home(shared: Project) -> None:
    program = "id -u; id -g; test -w ~ && whoami; grep -E '^(CapBnd|NoNewPrivs)' /proc/self/status; pwd; cat"
    said = wrapper(shared, "exec", "--", "sh", "-c", program, input_text="from outside\n").stdout.split()
    bounding = int(said[4], 16)
    assert said[:3] == ["1000", "1000", "branching"]
    assert bounding & (1 << 21 | 1 << 2) == 0, "SYS_ADMIN and DAC_READ_SEARCH can be had"
    assert said[5:] == ["NoNewPrivs:", "1", "/workspace", "from", "outside"]


def test_options_of_one_command_are_its_own(shared: Project) -> None:
    told = wrapper(shared, "-e", "WORD=one two", "exec", "--", "sh", "-c", 'echo "$WORD"; id -u')
    assert told.stdout == "one two\n1000\n"
    assert wrapper(shared, "--root", "exec", "--", "id", "-u").stdout == "0\n"
    assert wrapper(shared, "exec", "--", "id", "-u", BRANCHING_ROOT="1").stdout == "0\n"
    assert wrapper(shared, "exec", "--", "sh", "-c", "echo ${WORD-none}").stdout == "none\n"


def test_settings_files_are_read_again_only_after_they_changed(project: Project) -> None:
    """The list of loaded modules has no command-line library and no parser while the files are the same."""

    def told(*options: str) -> tuple[str, bool]:
        words = (*options, "exec", "--", "sh", "-c", 'echo "$WORD"')
        done = wrapper(project, *words, PYTHONPROFILEIMPORTTIME="1")
        return done.stdout, "typer" in done.stderr or "tomllib" in done.stderr

    configured = project.root / "branching-docker.toml"
    configured.write_text('env = ["WORD=one"]\n')
    with warm(project):
        assert told() == ("one\n", False)
        assert told("-e", "WORD=other") == ("other\n", False)
        configured.write_text('env = ["WORD=three"]\n')
        assert told() == ("three\n", True)
    with warm(project, "-e", "WORD=of the container"):
        assert told() == ("three\n", True)
    configured.unlink()


def test_options_that_the_warm_container_was_made_without_are_refused(shared: Project) -> None:
    done = wrapper(shared, "--network", "none", "-m", "1g", "exec", "--", "true")
    assert done.returncode == 125
    assert "made without --network --memory" in done.stderr
    assert wrapper(shared, "--network", "none", "up").returncode == 125


def test_large_input_and_output_pass_whole(shared: Project) -> None:
    text = "0123456789abcde\n" * 300_000
    assert wrapper(shared, "exec", "--", "cat", input_text=text).stdout == text


def test_another_directory_of_the_same_name_is_not_taken_for_the_first(project: Project, tmp_path: Path) -> None:
    with warm(project):
        moved = project.root.rename(tmp_path / "moved")
        project.root.mkdir()
        os.chown(project.root, project.owner, project.owner)
        try:
            for command in (("exec", "touch", "made"), ("run", "touch", "made"), ("up",)):
                done = wrapper(project, *command)
                assert (done.returncode, done.stdout) == (125, "")
                assert f"works on the directory that was {project.root} before" in done.stderr
            done = wrapper(Project(moved, project.owner), "run", "touch", "made")
            assert done.returncode == 125
            assert f"uses {moved} under another path, {project.root} (" in done.stderr
            assert not (moved / "made").exists()
        finally:
            project.root.rmdir()
    shutil.rmtree(moved)


def test_a_directory_inside_or_around_is_refused(shared: Project) -> None:
    (shared.root / "below").mkdir()
    try:
        for place, word in ((shared.root / "below", "inside"), (shared.root.parent, "around")):
            for command in (("up",), ("run", "true")):
                done = wrapper(Project(place, 1000), *command)
                assert done.returncode == 125
                assert f"is {word}" in done.stderr
    finally:
        (shared.root / "below").rmdir()


def test_two_concurrent_commands_share_a_container_and_the_second_commit_is_refused(shared: Project) -> None:
    """One waits until the other has committed a change of the same file: it is refused, and nothing of it arrives."""
    program = "echo slow >both; touch loser; echo up; cat >/dev/null"
    command = [str(WRAPPER), "-w", str(shared.root), "run", "--", "sh", "-c", program]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as slow:
        assert slow.stdout
        assert slow.stderr
        assert slow.stdout.readline() == "up\n"
        assert wrapper(shared, "run", "--", "sh", "-c", "echo fast >both").returncode == 0
        _, said = slow.communicate(timeout=RUN_SECONDS)
    assert slow.returncode != 0, said
    assert (shared.root / "both").read_text() == "fast\n"
    (shared.root / "both").unlink()
    assert not (shared.root / "loser").exists()


def started(project: Project, *words: str) -> subprocess.Popen[str]:
    """A command in the warm container that has said "up"; in a session of its own, as a terminal gives it one."""
    command = [str(WRAPPER), "-w", str(project.root), *words]
    client = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert client.stdout
    assert client.stdout.readline() == "up\n"
    return client


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda sent: sent.name)
@pytest.mark.parametrize("kind", ["run", "exec"])
def test_a_signal_ends_the_command_inside(shared: Project, kind: str, sent: signal.Signals) -> None:
    """docker exec would return 0 and leave it running."""
    with started(shared, kind, "--", "sh", "-c", "touch /tmp/half; echo up; exec sleep 600") as client:
        client.send_signal(sent)
        assert client.wait(RUN_SECONDS) == 128 + sent
    wait_until(lambda: "sleep" not in processes_inside(shared))


def test_a_command_may_handle_a_signal_itself(shared: Project) -> None:
    with started(shared, "exec", "sh", "-c", "trap 'exit 3' INT; echo up; while :; do sleep 0.1; done") as client:
        client.send_signal(signal.SIGINT)
        assert client.wait(RUN_SECONDS) == 3


def test_a_signal_before_the_command_has_begun_is_not_lost(shared: Project) -> None:
    for delay_seconds in (0.01, 0.03, 0.05, 0.1):
        with subprocess.Popen([WRAPPER, "-w", shared.root, "exec", "sleep", "600"], stdin=subprocess.DEVNULL) as client:
            time.sleep(delay_seconds)
            client.send_signal(signal.SIGTERM)
            assert client.wait(RUN_SECONDS) in (143, -signal.SIGTERM)
    wait_until(lambda: "sleep" not in processes_inside(shared))


def test_a_client_that_is_killed_takes_its_command_with_it(shared: Project) -> None:
    with started(shared, "exec", "--", "sh", "-c", "echo up; exec sleep 600") as client:
        client.kill()
        wait_until(lambda: "sleep" not in processes_inside(shared))


def wait_until(is_so: Callable[[], bool]) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + RUN_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def processes_inside(project: Project) -> str:
    """The programs that run in a project's container, but for the entry point's own pause."""
    program = 'for p in /proc/[0-9]*; do tr "\\0" " " <$p/cmdline; done 2>/dev/null | grep -o "sleep 60[0]"'
    return wrapper(project, "exec", "--", "sh", "-c", program).stdout


def test_a_terminal_is_passed_through_with_control_c(shared: Project) -> None:
    words = [str(WRAPPER), "-w", str(shared.root), "exec", "sh", "-c", "test -t 0 && test -t 1 && echo is-a-terminal"]
    words[-1] += "; stty size; echo up; exec sleep 600"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    try:
        assert b"is-a-terminal" in read_until(terminal, b"up\r\n", RUN_SECONDS)
        os.write(terminal, b"\x03")
        read_until(terminal, None, RUN_SECONDS)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        os.close(terminal)


def test_a_terminal_that_goes_ends_the_command_and_is_no_success(shared: Project) -> None:
    words = [str(WRAPPER), "-w", str(shared.root), "exec", "sh", "-c", "echo up; exec sleep 600"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(words[0], words)
    read_until(terminal, b"up\r\n", RUN_SECONDS)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    deadline = time.monotonic() + RUN_SECONDS
    while processes_inside(shared):
        assert time.monotonic() < deadline


def test_typed_input_reaches_a_command_whose_output_is_a_pipe(shared: Project) -> None:
    """Half a terminal: docker gets no TTY, and may not read one from a process group of its own."""
    words = [str(WRAPPER), "-w", str(shared.root), "exec", "head", "-n", "1"]
    reading, writing = os.pipe()
    pid, terminal = pty.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.execv(words[0], words)
    os.close(writing)
    try:
        os.write(terminal, b"typed\n")
        with os.fdopen(reading) as said:
            assert said.read() == "typed\n"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)


def test_without_a_warm_container_exec_says_how_to_get_one(project: Project) -> None:
    done = wrapper(project, "exec", "--", "true")
    assert done.returncode == 125
    assert "Hint: start one first: branching-docker -w DIR up" in done.stderr
    done = wrapper(project, "down")
    assert (done.returncode, done.stdout) == (0, "")


def test_an_idle_container_ends_by_itself(project: Project, engine: docker.DockerClient) -> None:
    """But not while a command runs in it. An hour passes by the entry point's own clock, the time of a file."""
    up = wrapper(project, "--idle", "59s", "up")
    assert up.returncode == 0, up.stderr
    container = engine.containers.get(up.stdout.strip())
    an_hour_passes = ["touch", "-d", "1 hour ago", "/run/branching/used"]
    words = [str(WRAPPER), "-w", str(project.root), "exec", "sh", "-c", "echo up; cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "up\n"
        assert container.exec_run(an_hour_passes).exit_code == 0
        time.sleep(3)  # it looks each second; nothing that can fail waits for this
        assert client.communicate("still there", timeout=RUN_SECONDS)[0] == "still there"
    assert client.returncode == 0, "it ended under a command"
    assert container.exec_run(an_hour_passes).exit_code == 0
    wait_until(lambda: not mine(engine, project))


def test_down_ends_commands_and_drops_their_work(project: Project) -> None:
    before = project.tree()
    with warm(project):
        client = started(project, "run", "--", "sh", "-c", "touch half; echo up; exec sleep 600")
    with client:
        assert client.wait(RUN_SECONDS) != 0
    assert project.tree() == before


def test_two_at_the_same_moment_are_one_or_a_refusal(make_project: Callable[..., Project]) -> None:
    """Neither corrupts: what both report as done is there, and what is refused left nothing."""
    project = make_project("raced")
    done: dict[str, subprocess.CompletedProcess[str]] = {}

    def run(name: str) -> None:
        done[name] = wrapper(project, "run", "--", "sh", "-c", f"sleep 0.5; touch {name}")

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, one in done.items():
        assert (project.root / name).exists() == (one.returncode == 0), one.stderr
        assert one.returncode == 0 or "another container is using" in one.stderr or "in use by another" in one.stderr
    assert any(one.returncode == 0 for one in done.values())


def mine(engine: docker.DockerClient, project: Project) -> list[dict[str, Any]]:
    """The containers on a project."""
    return labelled(engine, f"{WORKSPACE_LABEL}={project.root}")


def test_up_that_fails_says_why_and_leaves_nothing(make_project: Callable[..., Project]) -> None:
    project = make_project("odd")
    (project.root / ".branching").write_text("in the store's place\n")
    done = wrapper(project, "up")
    (project.root / ".branching").unlink()
    assert done.returncode == 125
    assert "BranchFS could not mount" in done.stderr
    assert "no warm container was started" in done.stderr
