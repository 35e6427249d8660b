"""Files of the host that a command names, which are read and written on the host.

    export BRANCH -o FILE     FILE is created, and is the container's standard output
    load BRANCH FILE          FILE is opened, and is the container's standard input
    mcp --token-file FILE     FILE is read, and its content is a variable of the container
    RACE --report FILE        the container keeps the page with its logs; a second command prints it into FILE
    RUN --cache DIR           DIR is mounted, at its own path

Streams work in a warm container too, which cannot get another mount. A written file belongs to the caller. As with
`branching` itself it must be new, and is removed if the command fails. `-` is a standard stream.
The document of `export --json` is printed here, because the container's standard output is the archive.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branching_docker.errors import WorkspaceError
from branching_docker.inner import parse_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RACES = ["speculate", "best-of-n", "reflexion", "cascaded", "tournament", "beam-search", "tree-of-thoughts", "fork"]
HOST_FILES = {
    "export": ("-o", "--output"),
    "load": 1,
    "mcp": ("--token-file",),
    **dict.fromkeys(RACES, ("--report",)),
}
"""Where each command names a file: the option's names, or the place among the arguments, from 0."""
TOKEN_VARIABLE = "BRANCHING_MCP_TOKEN"
REPORT_VARIABLE = "BRANCHING_REPORT"
"""Its value is the name under which the container keeps the page of `--report`."""
CACHE_OPTION = "--cache"
KEYS_OF_HOME = (".ssh", ".gnupg", ".aws", ".kube", ".docker", ".config", ".local/bin")
STANDARD_STREAM = "-"
JSON_VERSION = 1
"""Of the documents that `--json` prints."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A command and its arguments for the container, without the file of the host."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    reads: str | None = None
    writes: str | None = None
    export_of: str | None = None
    """The branch whose archive `writes` is, if `--json` asks for the document."""
    report: str | None = None
    """The file of the page that `report_words` prints afterwards."""
    caches: tuple[str, ...] = ()
    """Directories to mount, by their real paths."""

    @property
    def has_stream(self) -> bool:
        """Whether one of its standard streams is a file of the host."""
        return self.reads is not None or self.writes is not None

    @property
    def report_words(self) -> list[str]:
        """The command that prints the page."""
        return ["log", "--html", "--take-report", self.variables[REPORT_VARIABLE]]

    def take_report(self, run: Callable[[], int]) -> None:
        """Writes the page into the file, by a call of `run` for a command whose output it is; reports a failure."""
        assert self.report is not None, "it is called for a call with a report"
        draft = f"{self.report}.{os.urandom(4).hex()}"
        try:
            redirect_stream(os.devnull, os.O_RDONLY, 0)
            redirect_stream(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 1)
        except WorkspaceError as error:
            os.write(2, "".join(f"{line}\n" for line in error.lines()).encode(errors="backslashreplace"))
            return
        if run() == 0:
            os.replace(draft, self.report)  # noqa: PTH105
        else:
            os.unlink(draft)  # noqa: PTH108
            os.write(
                2, f"branching-docker: the report {self.report} was not written.\n".encode(errors="backslashreplace")
            )

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
        prints_document = self.export_of is not None and sys.stdout is not None  # it may be closed
        output = os.dup(1) if prints_document else None
        redirect_stream(self.writes, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 1)
        code = None
        try:
            code = run()
        finally:
            size = os.fstat(1).st_size
            if output is not None:
                os.dup2(output, 1)
                os.close(output)
            if code != 0:
                os.unlink(self.writes)  # noqa: PTH108
        if code == 0 and prints_document:
            facts = {"branch": self.export_of, "output": self.writes, "bytes": size}
            print(json.dumps({"version": JSON_VERSION, "command": "export", **facts}), flush=True)
        return code


def extract_host_file(words: Sequence[str]) -> Call:
    """Removes the file of the host from a command and its arguments.

    Raises:
        WorkspaceError: a token cannot be read, or others can read it.
    """
    command, *rest = words
    caches = mounted_caches(command, rest)
    where = HOST_FILES.get(command)
    named = []
    parsed = list(parse_words(command, rest)) if where is not None else []
    for word in parsed:
        is_named = word.option in where if isinstance(where, tuple) else not word.option
        named += [word] if is_named and word.value is not None else []
    if isinstance(where, int):
        named = named[where : where + 1]
    if not named or named[-1].value in (STANDARD_STREAM, "", None):
        return Call(words=[command, *rest], caches=caches)
    if command in RACES:
        report = checked_report(str(named[-1].value))
        variables = {REPORT_VARIABLE: os.urandom(8).hex()}
        return Call(words=[command, *rest], variables=variables, report=report, caches=caches)
    for word in reversed(named):
        del rest[word.place]
    path = str(named[-1].value)  # the last of several counts, as inside
    inside = [command, *rest]
    if command == "export":
        is_json = any(word.option == "--json" for word in parsed)
        branch = next((word.value for word in parsed if not word.option), None)
        return Call(words=inside, writes=path, export_of=branch if is_json else None)
    if command == "load":
        return Call(words=inside, reads=path)
    return Call(words=inside, variables={TOKEN_VARIABLE: token(path)})


def checked_report(path: str) -> str:
    """Returns the path of a report.

    Raises:
        WorkspaceError: no file can be written there; nothing was run.
    """
    above = os.path.dirname(path) or "."  # noqa: PTH120
    if os.path.lexists(path) and not os.path.isfile(path):  # noqa: PTH113
        raise WorkspaceError(f"--report {path}: it exists, and is not a file.", hint="name another file")
    if not os.access(above, os.W_OK | os.X_OK):
        raise WorkspaceError(f"--report {path}: no file can be written in {above}.", hint="name another directory")
    return path


def mounted_caches(command: str, rest: list[str]) -> tuple[str, ...]:
    """Returns the real paths of the directories of `--cache`, and puts these in the words in place.

    Raises:
        WorkspaceError: a directory does not exist, or must not be writable from a branch.
    """
    found = []
    for word in parse_words(command, rest):
        if word.option != CACHE_OPTION or word.value is None:
            continue
        path = os.path.realpath(os.path.expanduser(word.value))  # noqa: PTH111
        if not os.path.isdir(path):  # noqa: PTH112
            hint = f"mkdir -p {shlex.quote(word.value)}"
            raise WorkspaceError(f"--cache {word.value}: there is no such directory.", hint=hint)
        home = os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111
        if f"{home}/".startswith(path.rstrip("/") + "/"):
            what = "it is the home directory, or contains it"
            raise WorkspaceError(f"--cache {word.value}: {what}.", hint="name a directory that contains only a cache")
        if any(f"{path}/".startswith(f"{home}/{name}/") for name in KEYS_OF_HOME):
            raise WorkspaceError(
                f"--cache {word.value}: it contains your keys or settings.",
                hint="name a directory that contains only a cache",
            )
        rest[word.place.stop - 1] = path if word.place.stop - word.place.start > 1 else f"{CACHE_OPTION}={path}"
        found.append(path)
    return tuple(dict.fromkeys(found))


def token(path: str) -> str:
    """Returns the token in a file that only its owner may read.

    Raises:
        WorkspaceError: it cannot be read, or others can read it.
    """
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise WorkspaceError(
                    f"other users can read {path}, which contains the token.", hint=f"chmod 600 {path}"
                )
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
