"""The wrapper end to end, as a user runs it: on projects of every kind, comparing whole trees before and after."""

from __future__ import annotations

import json
import os
import pty
import secrets
import shlex
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from docker.errors import APIError

from conftest import WRAPPER
from terminal import read_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import docker

    from project_snapshot import Project

    Wrapper = Callable[..., subprocess.CompletedProcess[str]]

RUN_SECONDS = 180


@pytest.fixture
def wrapper(image: str) -> Wrapper:
    """Runs the wrapper on a project."""

    def run(project: Project, *arguments: str, input_text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [WRAPPER, "--image", image, "-w", project.root, *arguments],
            capture_output=True,
            text=True,
            input=input_text,
            timeout=RUN_SECONDS,
        )

    return run


@pytest.fixture
def client(image: str, project: Project) -> Iterator[subprocess.Popen[str]]:
    """A wrapper whose command has begun to change things and will go on for minutes."""
    command = [
        str(WRAPPER),
        "--image",
        image,
        "-w",
        str(project.root),
        "run",
        "--",
        "sh",
        "-c",
        "touch half; echo up; exec sleep 600",
    ]
    # A session of its own, so that a signal to its group, as a terminal sends one, is not one to us.
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert started.stdout
    assert started.stdout.readline() == "up\n"
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


@pytest.mark.contract("7.4", "7.5", "7.10")
def test_a_success_is_committed_and_belongs_to_the_owner(wrapper: Wrapper, project: Project) -> None:
    before = project.tree()
    program = (
        "echo new >sub/new.txt; rm dangling; echo more >>kept.txt; "
        "ln -s kept.txt soft; mkdir empty; chmod 600 script.sh"
    )
    done = wrapper(project, "run", "--", "sh", "-c", program)
    after = project.tree()
    assert done.returncode == 0, done.stderr
    assert after.keys() == before.keys() - {"dangling"} | {"sub/new.txt", "soft", "empty"}
    assert {(owner, group) for _, owner, group, *_ in after.values()} == {(project.owner, project.owner)}
    assert (project.root / "kept.txt").read_text() == "as it was\nmore\n"
    unchanged = before.keys() - {".", "dangling", "kept.txt", "script.sh", "sub", "sub/hard.txt"}
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}


@pytest.mark.contract("7.4", "7.7")
@pytest.mark.parametrize("code", [1, 7, 126, 127])
def test_a_failure_changes_nothing(wrapper: Wrapper, project: Project, code: int) -> None:
    before = project.tree()
    done = wrapper(project, "run", "--", "sh", "-c", f"rm -rf sub; echo x >kept.txt; touch new; exit {code}")
    assert (done.returncode, project.tree()) == (code, before)


@pytest.mark.parametrize("owner", [0, 1000, 54321])
def test_the_owner_of_the_directory_runs_the_command_and_owns_its_files(
    wrapper: Wrapper, make_project: Callable[..., Project], owner: int
) -> None:
    project = make_project(owner=owner)
    done = wrapper(project, "run", "--", "sh", "-c", "id -u >uid; mkdir -p a/b; touch a/b/c")
    assert done.returncode == 0, done.stderr
    assert (project.root / "uid").read_text() == f"{owner}\n"
    assert {(uid, gid) for _, uid, gid, *_ in project.tree().values()} == {(owner, owner)}


@pytest.mark.parametrize(("owner", "options"), [(0, []), (33, []), (1000, []), (1000, ["--root"])], ids=str)
@pytest.mark.parametrize("is_warm", [False, True], ids=["", "warm"])
def test_each_command_has_a_home_of_its_own_to_write_in(
    wrapper: Wrapper, make_project: Callable[..., Project], owner: int, options: list[str], is_warm: bool
) -> None:
    """Tools keep caches there, and fail where they cannot; what one command left there another does not find."""
    project = make_project(owner=owner)
    if is_warm:
        assert wrapper(project, "up").returncode == 0
    try:
        for _ in range(2):
            done = wrapper(project, *options, "run", "--", "sh", "-c", "test ! -e ~/.cache && mkdir -p ~/.cache/tool")
            assert done.returncode == 0, done.stderr
    finally:
        if is_warm:
            wrapper(project, "down")


def test_root_when_asked_has_no_power_over_the_files_of_another(
    wrapper: Wrapper, make_project: Callable[..., Project]
) -> None:
    """In a branch root is a number without capabilities: nothing of root's can come into a user's directory."""
    project = make_project()
    before = project.tree()
    done = wrapper(project, "--root", "run", "--", "sh", "-c", "id -u; touch of-root; echo more >>kept.txt")
    assert done.returncode != 0
    assert done.stdout.splitlines()[0] == "0"
    assert (project.tree(), project.roots()) == (before, [])
    shared = make_project("shared")
    shared.root.chmod(0o1777)
    done = wrapper(shared, "--root", "run", "--", "touch", "of-root")
    assert done.returncode == 0, done.stderr
    assert (shared.root / "of-root").stat().st_uid == 0


@pytest.mark.parametrize(
    "name", ["with space", "prøject ✓", "a,b", 'quo"te', "co:lon", "-dash", "=", "$HOME", "'single'", "new\nline"]
)
def test_any_directory_name_will_do(wrapper: Wrapper, make_project: Callable[..., Project], name: str) -> None:
    project = make_project(name)
    assert wrapper(project, "run", "--", "touch", "new file ✓").returncode == 0
    assert (project.root / "new file ✓").exists()


def test_a_link_to_the_directory_will_do(wrapper: Wrapper, project: Project) -> None:
    link = type(project)(project.root.parent / "link", project.owner)
    link.root.symlink_to(project.root.name)
    assert wrapper(link, "run", "--", "touch", "new").returncode == 0
    assert (project.root / "new").exists()


def test_standard_input_arrives_whole(wrapper: Wrapper, project: Project) -> None:
    text = "0123456789abcde\n" * 300_000
    done = wrapper(project, "run", "--", "sh", "-c", "cat >got", input_text=text)
    assert done.returncode == 0, done.stderr
    assert (project.root / "got").read_text() == text


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_not_there_are_empty_and_silent(project: Project, image: str, closed: str) -> None:
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), "run", "--", "sh", "-c", "cat; echo x >out"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stderr
    assert (project.root / "out").read_text() == "x\n"


def test_a_pipe_is_not_made_a_terminal(wrapper: Wrapper, project: Project) -> None:
    done = wrapper(project, "run", "--", "sh", "-c", "test -t 0 || test -t 1 || test -t 2")
    assert done.returncode == 1


@pytest.mark.contract("7.10")
def test_a_terminal_is_a_terminal_and_control_c_ends_the_command(image: str, project: Project) -> None:
    before = project.tree()
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), "run", "--", "sh", "-c"]
    # exec, for dash loses the key that is struck while it starts a program with vfork(): parent
    # and child share the flag by which the signal is put off (seen with nothing of ours around it).
    script = "test -t 0 && test -t 1 && touch half && echo is-a-terminal && exec sleep 600"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(command[0], [*command, script])
    try:
        said = read_until(terminal, b"is-a-terminal", RUN_SECONDS)
        assert b"is-a-terminal" in said
        os.write(terminal, b"\x03")
        read_until(terminal, None, RUN_SECONDS)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        os.close(terminal)
    assert project.tree() == before


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str)
def test_a_signal_ends_the_command_and_drops_its_work(
    client: subprocess.Popen[str], project: Project, sent: signal.Signals, code: int
) -> None:
    client.send_signal(sent)
    assert client.wait(RUN_SECONDS) == code
    assert not (project.root / "half").exists()


def test_control_c_without_a_terminal_of_the_containers_is_heard_once(
    client: subprocess.Popen[str], project: Project
) -> None:
    """As a shell sends it: to the whole process group."""
    os.killpg(client.pid, signal.SIGINT)
    assert client.wait(RUN_SECONDS) == 130
    assert not (project.root / "half").exists()


@pytest.mark.parametrize("delay_seconds", [0.05, 0.2, 0.3, 0.4, 0.5])
def test_control_c_while_things_start_leaves_nothing(image: str, project: Project, delay_seconds: float) -> None:
    """Repeated, as an impatient user does: docker itself loses a signal that comes before its container has begun."""
    before = project.tree()
    command = [
        str(WRAPPER),
        "--image",
        image,
        "-w",
        str(project.root),
        "run",
        "--",
        "sh",
        "-c",
        "touch half; exec sleep 600",
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as client:
        time.sleep(delay_seconds)
        deadline = time.monotonic() + RUN_SECONDS
        while client.poll() is None:
            assert time.monotonic() < deadline
            os.killpg(client.pid, signal.SIGINT)
            time.sleep(0.5)
    assert client.returncode != 0
    assert project.tree() == before


def test_a_client_that_is_killed_takes_its_container_with_it(client: subprocess.Popen[str], project: Project) -> None:
    """The check for containers, processes and stores that follows every test is the assertion."""
    client.kill()
    assert client.wait(RUN_SECONDS) == -signal.SIGKILL
    assert not (project.root / "half").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda sent: sent.name)
def test_a_container_that_the_engine_is_still_making_goes_with_its_client(
    image: str, project: Project, engine: docker.DockerClient, sent: signal.Signals
) -> None:
    """A new volume is filled with what the image has at its place: that makes the making last for seconds."""
    volume = f"branching-test-{secrets.token_hex(4)}"
    command = [str(WRAPPER), "--image", image, "-w", str(project.root), "-v", f"{volume}:/usr", "run", "--", "true"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as client:
        until(lambda: bool(engine.volumes.list(filters={"name": volume})), "its volume")
        client.send_signal(sent)
    assert client.returncode != 0
    until(lambda: is_removed(engine, volume), "the volume being nobody's")


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + RUN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_removed(engine: docker.DockerClient, volume: str) -> bool:
    """Removes a volume, unless a container uses it, listed or not yet listed."""
    try:
        engine.volumes.get(volume).remove()
    except APIError:
        return False
    return True


@pytest.mark.contract("7.5")
def test_the_last_to_finish_wins_when_it_alone_succeeds(wrapper: Wrapper, project: Project) -> None:
    before = project.tree()
    failing = ("-c", "rm -rf sub; exit 1", "-c", "echo ruined >kept.txt; exit 2", "-c", "touch third; exit 3")
    done = wrapper(project, "speculate", "--json", *failing, "-c", "sleep 2; touch won")
    told = json.loads(done.stdout)
    assert (done.returncode, told["committed"], told["winner"]) == (0, True, 3)
    after = project.tree()
    assert after.keys() - before.keys() == {"won"}
    assert {name: after[name] for name in before if name != "."} == {
        name: entry for name, entry in before.items() if name != "."
    }


def test_a_winner_does_not_wait_for_the_losers(wrapper: Wrapper, project: Project) -> None:
    """The losers would go on for longer than the wrapper is waited for."""
    done = wrapper(project, "speculate", "-c", "touch won", "-c", "sleep 600", "-c", "setsid sleep 600 & sleep 600")
    assert done.returncode == 0, done.stderr
    assert (project.root / "won").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("speculate", "-c", "rm -rf sub; exit 1", "-c", "touch x; false"),
        ("best-of-n", "-n", "2", "--", "sh", "-c", "touch x; exit 3"),
        ("reflexion", "--retries", "2", "--", "sh", "-c", "touch x; exit 3"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_when_all_fail_nothing_changes(wrapper: Wrapper, project: Project, arguments: tuple[str, ...]) -> None:
    before = project.tree()
    assert wrapper(project, *arguments).returncode == 1
    assert project.tree() == before


@pytest.mark.contract("7.5")
def test_the_best_score_is_committed(wrapper: Wrapper, project: Project) -> None:
    program = (
        'echo "$BRANCHING_ATTEMPT" >attempt; case $BRANCHING_ATTEMPT in 1) echo 0.9 >&3 ;; *) echo 0.2 >&3 ;; esac'
    )
    done = wrapper(project, "best-of-n", "-n", "3", "--json", "--", "sh", "-c", program)
    assert json.loads(done.stdout)["winner"] == {"index": 1, "score": 0.9}
    assert (project.root / "attempt").read_text() == "1\n"


def test_the_critique_reaches_the_next_attempt(wrapper: Wrapper, project: Project) -> None:
    program = 'echo "$BRANCHING_FEEDBACK" >heard; test "$BRANCHING_FEEDBACK" = "attempt 1 was bad"'
    critique = 'echo "attempt $BRANCHING_ATTEMPT was bad"'
    done = wrapper(project, "reflexion", "--retries", "4", "--critique", critique, "--json", "--", "sh", "-c", program)
    assert json.loads(done.stdout)["winner"] == 2
    assert (project.root / "heard").read_text() == "attempt 1 was bad\n"


def test_status_tells_about_the_workspace(wrapper: Wrapper, project: Project) -> None:
    told = json.loads(wrapper(project, "status", "--json").stdout)
    assert (told["workspace"], told["fstype"], told["branches"]) == ("/workspace", "overlay", [])
    assert told["host_workspace"] == str(project.root)
    assert f"workspace: {project.root}\n" in wrapper(project, "status").stdout


@pytest.mark.parametrize("is_warm", [False, True], ids=["", "warm"])
def test_messages_name_the_directory_and_the_command_of_the_host(
    wrapper: Wrapper, make_project: Callable[..., Project], is_warm: bool
) -> None:
    """Of what the user's own command prints nothing is changed."""
    project = make_project("it's mine")
    name = f"branching-docker -w {shlex.quote(str(project.root))}"
    if is_warm:
        assert wrapper(project, "up").returncode == 0
    try:
        refused = wrapper(project, "commit", "none")
        assert refused.stderr == f"error: no branch 'none' is open in {project.root}\nHint: {name} ls lists them\n"
        done = wrapper(project, "run", "--", "sh", "-c", "touch made; pwd; echo branching ls /src")
        assert done.stdout == "/workspace\nbranching ls /src\n"
        assert done.stderr.endswith(f"committed 1 path (+1) · undo: {name} undo\n")
        assert wrapper(project, "commit").stderr.startswith(f"Usage: {name} commit ")
    finally:
        if is_warm:
            wrapper(project, "down")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("run", "--", "no-such-command"), 127, "no-such-command"),
        (("run", "--", "./kept.txt"), 126, "kept.txt"),
        (("run",), 2, "no command"),
        (("speculate",), 2, "candidate"),
        (("run", "-b", "a/b", "--", "touch", "ran"), 2, "a/b"),
        (("run", "-b", "a\nb", "--", "touch", "ran"), 2, "name"),
        (("run", "--frobnicate", "--", "touch", "ran"), 2, "frobnicate"),
    ],
    ids=[
        "no such command",
        "not executable",
        "no command",
        "no candidates",
        "name with /",
        "name with newline",
        "option",
    ],
)
def test_bad_input_is_one_sentence_a_code_and_no_change(
    wrapper: Wrapper, project: Project, arguments: tuple[str, ...], code: int, message: str
) -> None:
    before = project.tree()
    done = wrapper(project, *arguments)
    assert (done.returncode, project.tree()) == (code, before), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_image_that_is_not_there_is_named(project: Project) -> None:
    done = subprocess.run(
        [WRAPPER, "--image", "no-such-image:1", "-w", project.root, "run", "true"], capture_output=True, text=True
    )
    assert done.returncode == 125
    assert 'the image "no-such-image:1" is not on this machine.\nHint: ' in done.stderr


def test_help_of_a_command_comes_from_the_image(wrapper: Wrapper, project: Project) -> None:
    done = wrapper(project, "run", "--help")
    assert done.returncode == 0
    assert "--on-error" in done.stdout


def test_fifty_thousand_files_are_branched_at_once_and_none_is_touched(wrapper: Wrapper, project: Project) -> None:
    many = project.root / "many"
    for directory in range(100):
        (many / f"{directory}").mkdir(parents=True)
        for number in range(500):
            (many / f"{directory}" / f"{number}.txt").write_bytes(b"%d\n" % number)
    for path in (many, *many.rglob("*")):
        os.chown(path, project.owner, project.owner)
    before = project.tree()
    done = wrapper(project, "run", "--", "sh", "-c", "test $(find many -type f | wc -l) = 50000 && touch many/0/new")
    assert done.returncode == 0, done.stderr
    after = project.tree()
    assert after.keys() - before.keys() == {"many/0/new"}
    assert {name for name in before if before[name] != after[name]} == {"many/0"}
