"""A command in a warm container: `docker exec`, with the signals and the end that it does not pass on.

docker exec returns at once when it is interrupted, with 0, and leaves its process running. So we stay: it gets a
process group of its own, our signals reach the command inside by its token, and the exit code is what it ends with.
Between two terminals there is nothing to pass on, since Ctrl-C is a byte there. Should we be killed outright, the
watcher sees its pipe close without a word and ends the command inside.

On the way of every warm command, thus without the modules that make Python start slowly.
"""

from __future__ import annotations

import os
import signal

from branching_docker.names import ENTER_PROGRAM, EXEC

TYPE_CHECKING = False  # see endpoint
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
WATCHER = 'read -r _ || "$0" exec "$1" branching-enter --signal "$2" 15'
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
    return [docker, "exec", "--interactive", *terminal, *options, container, ENTER_PROGRAM, token, *inside]


def presentation(environ: Mapping[str, str], *, tty: bool) -> list[str]:
    """Returns the variables of the host's terminal that may be known inside."""
    return [
        f"{variable}={environ[variable]}"
        for variable in PRESENTATION_VARIABLES
        if variable in environ and (tty or variable != "TERM")
    ]


def enter(
    inside: Sequence[str], *, docker: str, container: str, environ: Mapping[str, str], options: Sequence[str] = ()
) -> int:
    """Runs these words in a warm container to their end and returns the exit code."""
    tty = os.isatty(0) and os.isatty(1)
    shown = [word for assignment in presentation(environ, tty=tty) for word in ("--env", assignment)]
    token = os.urandom(8).hex()
    argv = enter_argv(inside, docker=docker, container=container, token=token, tty=tty, options=(*options, *shown))
    # A terminal whose other end is no terminal is read here: a process group of its own may not read it.
    feed = os.pipe() if not tty and os.isatty(0) else None
    actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, feed[0], 0)] if feed else []
    hear = signal.signal
    before = {number: signal.getsignal(number) for number in PASSED_ON}

    def pass_on(number: int, _frame: object) -> None:
        inside = [docker, "exec", container, ENTER_PROGRAM, "--signal", token, str(number)]
        null = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (1, 2)]
        os.posix_spawn(docker, inside, environ, file_actions=null)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            hear(number, pass_on)
    group = os.getpgrp() if tty else 0
    running = os.posix_spawn(docker, argv, environ, file_actions=actions, setsigdef=IGNORED_BY_PYTHON, setpgroup=group)
    reading, writing = os.pipe()  # not inheritable: the watcher's end is its standard input alone
    quiet = [(os.POSIX_SPAWN_OPEN, descriptor, "/dev/null", os.O_RDWR, 0) for descriptor in (1, 2)]
    watcher = ["/bin/sh", "-c", WATCHER, docker, container, token]
    os.posix_spawn(watcher[0], watcher, environ, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *quiet], setsid=True)
    if feed:
        os.close(feed[0])
        forward_input(feed[1])
    try:
        status = os.waitpid(running, 0)[1]
    finally:
        os.write(writing, b"\n")
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
