"""A command in a warm container: `docker exec`, with the signals that it does not forward.

When `docker exec` is interrupted, it returns 0 immediately and leaves its process running. So this process stays: it
forwards signals to the command by its token, and returns the command's exit code. If this process is killed, a watcher
sees its pipe close and ends the command.

Without a terminal the streams go over Docker's socket (`engine_api`). With a terminal the docker command runs, and no
signal needs to be forwarded, because Ctrl-C is a byte there. It also runs for Podman and for --env-file, in a process
group of its own.

Every warm command imports this module, so it imports nothing slow: `_signal` and not `signal`, which takes 3 ms.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

from branching_docker.constants import EXEC, EXEC_PROGRAM

TYPE_CHECKING = False  # see docker_context
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORWARDED_SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
IGNORED_BY_PYTHON = (_signal.SIGPIPE, _signal.SIGXFSZ)
WATCHER = 'read -r _ || "$0" exec "$1" branching-exec-command --signal "$2" 15'
READ_BYTES = 1 << 16
# The output is for the host's terminal, and docker passes none of these by itself.
PRESENTATION_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")


def container_words(words: Sequence[str]) -> list[str] | None:
    """Returns the arguments of the image's exec-command for a command of ours; None for an `exec` without a command."""
    if words[0] != EXEC:
        return ["branching", *words]
    command = words[2:] if words[1:2] == ["--"] else words[1:]
    return ["--as-owner", *command] if command and not command[0].startswith("-") else None


def exec_argv(
    inside: Sequence[str], *, docker: str, container: str, token: str, tty: bool, options: Sequence[str] = ()
) -> list[str]:
    """Returns the docker command that runs these words in a warm container."""
    terminal = ["--tty"] if tty else []
    return [docker, "exec", "--interactive", *terminal, *options, container, EXEC_PROGRAM, token, *inside]


def presentation(environ: Mapping[str, str], *, tty: bool) -> list[str]:
    """Returns the variables of the host's terminal for a command in a container."""
    return [
        f"{variable}={environ[variable]}"
        for variable in PRESENTATION_VARIABLES
        if variable in environ and (tty or variable != "TERM")
    ]


def run_in_container(
    inside: Sequence[str],
    *,
    docker: str,
    container: str,
    environ: Mapping[str, str],
    options: Sequence[str] = (),
    at: str | None = None,
) -> int:
    """Runs these words in a warm container to their end and returns the exit code.

    `options` are docker exec's; `at` is Docker's socket, if it is Docker.
    """
    tty = os.isatty(0) and os.isatty(1)
    options = [*options, *(word for assignment in presentation(environ, tty=tty) for word in ("--env", assignment))]
    token = os.urandom(8).hex()
    came = set()

    def forward(number: int, _frame: object = None) -> None:
        came.add(number)
        inside = [docker, "exec", container, EXEC_PROGRAM, "--signal", token, str(number)]
        null = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        # A session of its own: the end of a terminal ends the processes of its session.
        os.posix_spawn(docker, inside, environ, file_actions=null, setsid=True)

    for number in FORWARDED_SIGNALS:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, forward)
    reading, writing = os.pipe()  # not inheritable: the watcher's end is its standard input alone
    quiet = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (1, 2)]
    watcher = ["/bin/sh", "-c", WATCHER, docker, container, token]
    os.posix_spawn(watcher[0], watcher, environ, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *quiet], setsid=True)
    code = None
    if at is not None and not tty and "--env-file" not in options:
        words = [EXEC_PROGRAM, token, *inside]
        code = by_socket(words, container=container, environ=environ, options=options, at=at, forward=forward)
    if code is None:
        argv = exec_argv(inside, docker=docker, container=container, token=token, tty=tty, options=options)
        code = by_command(argv, environ=environ, tty=tty)
    if tty and code == 0 and _signal.SIGHUP in came:
        # The terminal was closed and docker has ended with it, but the command may still run; the watcher ends it.
        return 128 + int(_signal.SIGHUP)
    os.write(writing, b"\n")
    return code


def by_socket(
    words: Sequence[str],
    *,
    container: str,
    environ: Mapping[str, str],
    options: Sequence[str],
    at: str,
    forward: Callable[[int], None],
) -> int | None:
    """Runs words in a container over Docker's socket and returns the exit code; None where they were not started."""
    from branching_docker import engine_api

    given = list(zip(options[::2], options[1::2], strict=True))
    variables = [value for name, value in given if name == "--env"]
    # As docker has it: a name alone takes the value from here, and says nothing where there is none.
    variables = [one if "=" in one else f"{one}={environ[one]}" for one in variables if "=" in one or one in environ]
    user = next((value for name, value in reversed(given) if name == "--user"), "")
    identifier = engine_api.create_exec(container, words, at=at, environ=variables, user=user)
    started = engine_api.start_exec(identifier, at=at) if identifier else None
    if identifier is None or started is None:
        return None
    engine_api.pump_streams(*started, send_signal=forward)
    return engine_api.wait_exec(identifier, at=at)


def by_command(argv: list[str], *, environ: Mapping[str, str], tty: bool) -> int:
    """Runs docker's command and returns its exit code."""
    # A terminal whose other end is no terminal is read here: a process group of its own may not read it.
    feed = os.pipe() if not tty and os.isatty(0) else None
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, feed[0], 0)] if feed else []
    group = os.getpgrp() if tty else 0
    running = os.posix_spawn(argv[0], argv, environ, file_actions=actions, setsigdef=IGNORED_BY_PYTHON, setpgroup=group)
    if feed:
        os.close(feed[0])
        forward_input(feed[1])
    return exit_code(os.waitpid(running, 0)[1])


def exit_code(status: int) -> int:
    """Returns the exit code that a shell has for a process's wait status."""
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def forward_input(into: int) -> None:
    """Copies our standard input into a pipe, in a thread that ends with us."""
    import threading

    def copy() -> None:
        try:
            while some := os.read(0, READ_BYTES):
                while some:
                    some = some[os.write(into, some) :]
        except OSError:
            pass  # the reader has gone
        os.close(into)

    threading.Thread(target=copy, daemon=True).start()
