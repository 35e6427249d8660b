"""Files of the host that a command names, which are read and written on the host.

    export BRANCH -o FILE     FILE is created, and is the container's standard output
    load BRANCH FILE          FILE is opened, and is the container's standard input
    mcp --token-file FILE     FILE is read, and its content is a variable of the container

Streams work in a warm container too, which cannot get another mount. A written file belongs to the caller. As with
`branching` itself it must be new, and is removed if the command fails. `-` is a standard stream.
"""

from __future__ import annotations

import os
import shlex
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branching_docker.errors import WorkspaceError
from branching_docker.inner import parse_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST_FILES = {"export": ("-o", "--output"), "load": 1, "mcp": ("--token-file",)}
"""Where each command names a file: the option's names, or the place among the arguments, from 0."""
TOKEN_VARIABLE = "BRANCHING_MCP_TOKEN"
STANDARD_STREAM = "-"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A command and its arguments for the container, without the file of the host."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    reads: str | None = None
    writes: str | None = None

    @property
    def has_stream(self) -> bool:
        """Whether one of its standard streams is a file of the host."""
        return self.reads is not None or self.writes is not None

    def shown(self) -> list[str]:
        """Returns the redirection, as a shell has it, for a dry run."""
        named = ((">", self.writes), ("<", self.reads))
        return [word for sign, path in named if path for word in (sign, shlex.quote(path))]

    def run(self, run: Callable[[], int]) -> int:
        """Redirects a stream to the file, calls `run` for the exit code, and removes a new file after a failure.

        Raises:
            WorkspaceError: the file cannot be opened; nothing was run.
        """
        if not self.has_stream:
            return run()
        redirect_stream(os.devnull if self.reads is None else self.reads, os.O_RDONLY, 0)
        if self.writes is None:
            return run()
        redirect_stream(self.writes, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 1)
        code = None
        try:
            code = run()
        finally:
            if code != 0:
                os.unlink(self.writes)  # noqa: PTH108
        return code


def extract_host_file(words: Sequence[str]) -> Call:
    """Removes the file of the host from a command and its arguments.

    Raises:
        WorkspaceError: a token cannot be read, or others can read it.
    """
    command, *rest = words
    where = HOST_FILES.get(command)
    named = []
    for word in parse_words(command, rest) if where is not None else ():
        is_named = word.option in where if isinstance(where, tuple) else not word.option
        named += [word] if is_named and word.value is not None else []
    if isinstance(where, int):
        named = named[where : where + 1]
    if not named or named[-1].value in (STANDARD_STREAM, "", None):
        return Call(words=list(words))
    for word in reversed(named):
        del rest[word.place]
    path = str(named[-1].value)  # the last of several counts, as inside
    inside = [command, *rest]
    if command == "export":
        return Call(words=inside, writes=path)
    if command == "load":
        return Call(words=inside, reads=path)
    return Call(words=inside, variables={TOKEN_VARIABLE: token(path)})


def token(path: str) -> str:
    """Returns the token in a file that only its owner may read.

    Raises:
        WorkspaceError: it cannot be read, or others can read it.
    """
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise WorkspaceError(f"others may read {path}, which has the token.", hint=f"chmod 600 {path}")
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(path, error) from error


def redirect_stream(path: str, flags: int, stream: int) -> None:
    """Opens a file of the host as a standard stream of this process."""
    try:
        opened = os.open(path, flags | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise refusal(path, error) from error
    os.dup2(opened, stream)
    os.close(opened)


def refusal(path: str, error: OSError | UnicodeDecodeError) -> WorkspaceError:
    """Returns the failure for a file that cannot be opened."""
    cause = error.strerror if isinstance(error, OSError) else str(error)
    hint = "check its path: it is one of this machine, not of the container"
    if isinstance(error, FileExistsError):
        hint = "name a new file, or remove that one"
    return WorkspaceError(f"the file {path} cannot be used.", cause=cause, hint=hint)
