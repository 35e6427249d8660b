"""A command in a warm container: `docker exec`, with the signals and the end that it does not pass on.

docker exec returns at once when it is interrupted, with 0, and leaves its process running. So we stay: our signals
reach the command inside by its token, and the exit code is what it ends with. Should we be killed outright, the watcher
sees its pipe close without a word and ends the command inside.

Three pipes go over Docker's socket, by `attach`. Two terminals are docker's affair, and there is nothing to pass on,
since Ctrl-C is a byte there. What else there is (Podman, a file of variables) is docker's too, in a process group of
its own.

On the way of every warm command, thus without the modules that make Python start slowly.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps in enums
import os

from branching_docker.names import EXEC_PROGRAM, EXEC

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PASSED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
IGNORED_BY_PYTHON = (_signal.SIGPIPE, _signal.SIGXFSZ)
WATCHER = 'read -r _ || "$0" exec "$1" branching-exec-command --signal "$2" 15'
READ_BYTES = 1 << 16
# How the output may look is the host terminal's affair; docker passes on none of these by itself.
PRESENTATION_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM")


def inner_words(words: Sequence[str]) -> list[str] | None:
    """Returns what the image's entry runs for a command and its arguments; None for an `exec` of nothing."""
    if words[0] != EXEC:
        return ["branching", *words]
    command = words[2:] if words[1:2] == ["--"] else words[1:]
    return ["--as-owner", *command] if command and not command[0].startswith("-") else None


def enter_argv(
    inside: Sequence[str], *, docker: str, container: str, token: str, tty: bool, options: Sequence[str] = ()
) -> list[str]:
    """Returns the command that runs these words in a warm container."""
    terminal = ["--tty"] if tty else []
    return [docker, "exec", "--interactive", *terminal, *options, container, EXEC_PROGRAM, token, *inside]


def presentation(environ: Mapping[str, str], *, tty: bool) -> list[str]:
    """Returns the variables of the host's terminal that may be known inside."""
    return [
        f"{variable}={environ[variable]}"
        for variable in PRESENTATION_VARIABLES
        if variable in environ and (tty or variable != "TERM")
    ]


def enter(
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

    def pass_on(number: int, _frame: object = None) -> None:
        came.add(number)
        inside = [docker, "exec", container, EXEC_PROGRAM, "--signal", token, str(number)]
        null = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (0, 1, 2)]
        # A session of its own: a terminal that goes takes its session's processes along.
        os.posix_spawn(docker, inside, environ, file_actions=null, setsid=True)

    for number in PASSED_ON:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, pass_on)
    reading, writing = os.pipe()  # not inheritable: the watcher's end is its standard input alone
    quiet = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (1, 2)]
    watcher = ["/bin/sh", "-c", WATCHER, docker, container, token]
    os.posix_spawn(watcher[0], watcher, environ, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *quiet], setsid=True)
    code = None
    if at is not None and not tty and "--env-file" not in options:
        words = [EXEC_PROGRAM, token, *inside]
        code = by_socket(words, container=container, environ=environ, options=options, at=at, pass_on=pass_on)
    if code is None:
        argv = enter_argv(inside, docker=docker, container=container, token=token, tty=tty, options=options)
        code = by_command(argv, environ=environ, tty=tty)
    if tty and code == 0 and _signal.SIGHUP in came:
        # The terminal has gone, and docker with it; the command inside may not have noticed. Nobody waits for it any
        # more, and the watcher ends it: this is no end of its own.
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
    pass_on: Callable[[int], None],
) -> int | None:
    """Runs words in a container over Docker's socket and returns the exit code; None where they were not started."""
    from branching_docker import attach

    given = list(zip(options[::2], options[1::2], strict=True))
    variables = [value for name, value in given if name == "--env"]
    # As docker has it: a name alone takes the value from here, and says nothing where there is none.
    variables = [one if "=" in one else f"{one}={environ[one]}" for one in variables if "=" in one or one in environ]
    user = next((value for name, value in reversed(given) if name == "--user"), "")
    identifier = attach.begin(container, words, at=at, environ=variables, user=user)
    started = attach.start(identifier, at=at) if identifier else None
    if identifier is None or started is None:
        return None
    attach.converse(*started, end=pass_on)
    return attach.ended(identifier, at=at)


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
            pass  # nobody reads it any more
        os.close(into)

    threading.Thread(target=copy, daemon=True).start()
