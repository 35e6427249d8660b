"""A branch as pydantic-ai's workspace: commands and files of one run, in one sandbox.

The run sees the branch at the workspace's own path, the same in every branch and after the merge.
Commands and file operations are done by a process in the branch's sandbox, so both see the same
files under the same names with the same rights, and nothing reaches out of the branch. What a
command leaves running is there for the next command, until the branch ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic_ai.workspaces import (
    CommandResult,
    FileEntry,
    SupportsCommands,
    SupportsFilesystem,
    SupportsRealpath,
    WorkspaceBackend,
    WorkspaceCommand,
    WorkspaceOutputLimitError,
    WorkspaceRef,
    WorkspaceTimeoutError,
    WorkspaceUnavailableError,
)

from branching.agent.sandbox import BranchSandbox, Completed, SandboxGone
from branching.agent.sandbox.client import OUTPUT_BYTES_MAX, Reply

PROVIDER = "branching"


class BranchWorkspace(WorkspaceBackend, SupportsCommands, SupportsFilesystem, SupportsRealpath):
    """The workspace of one branch. `close` of its sandbox ends all that runs in it.

    Args:
        sandbox: The sandbox in which commands and file operations run.
        ref: The reference of the conversation that goes on in it. By default it has none before
            the first use, and then the path at which commands see the directory: the same in every
            branch, after a merge, and in another process that mounts the directory elsewhere.
    """

    def __init__(self, sandbox: BranchSandbox, ref: WorkspaceRef | None = None) -> None:
        self.sandbox = sandbox
        self._ref = ref

    @property
    def ref(self) -> WorkspaceRef | None:
        return self._ref

    async def working_dir(self) -> str:
        reply, _ = await self._ask("cwd")
        return str(reply["path"])

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        self._use()
        if isinstance(command, str) is not shell:
            raise TypeError("a string goes with shell=True, a sequence of words without")
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        try:
            done = await self.sandbox.run(argv, env=env, timeout=timeout)
        except SandboxGone as error:
            raise WorkspaceUnavailableError(str(error)) from error
        self._use()
        return _result(done, timeout)

    async def read_bytes(self, path: str) -> bytes:
        _, body = await self._ask("read", path=_absolute(path))
        return body

    async def write_bytes(self, path: str, data: bytes) -> None:
        await self._ask("write", data, path=_absolute(path))

    async def stat(self, path: str) -> FileEntry:
        reply, _ = await self._ask("stat", path=_absolute(path))
        return _entry(reply)

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        reply, _ = await self._ask("list", path=_absolute(path))
        return [_entry(entry) for entry in reply["entries"]]

    async def make_dir(self, path: str) -> None:
        await self._ask("mkdir", path=_absolute(path))

    async def remove(self, path: str) -> None:
        await self._ask("remove", path=_absolute(path))

    async def exists(self, path: str) -> bool:
        reply, _ = await self._ask("exists", path=_absolute(path))
        return bool(reply["exists"])

    async def realpath(self, path: str) -> str:
        reply, _ = await self._ask("realpath", path=_absolute(path))
        return str(reply["path"])

    async def _ask(self, op: str, body: bytes = b"", **facts: object) -> Reply:
        self._use()
        try:
            return await self.sandbox.call(op, body, **facts)
        except SandboxGone as error:
            raise WorkspaceUnavailableError(str(error)) from error

    def _use(self) -> None:
        if not self.sandbox.directory.is_dir():
            raise WorkspaceUnavailableError(f"the branch at {self.sandbox.directory} is gone")
        if self._ref is None:
            self._ref = WorkspaceRef(provider=PROVIDER, id=str(self.sandbox.seen_at))


def _result(done: Completed, timeout: float | None) -> CommandResult:
    stdout = done.stdout.decode("utf-8", "replace")
    stderr = done.stderr.decode("utf-8", "replace")
    if done.how == "timeout":
        raise WorkspaceTimeoutError(
            f"the command did not end within {timeout:g} s and was killed",
            stdout=stdout,
            stderr=stderr,
        )
    if done.how == "output":
        raise WorkspaceOutputLimitError(
            f"the command printed more than {OUTPUT_BYTES_MAX} bytes and was killed",
            limit=OUTPUT_BYTES_MAX,
            stdout=stdout,
            stderr=stderr,
        )
    return CommandResult(exit_code=done.exit_code, stdout=stdout, stderr=stderr)


def _entry(reply: Mapping[str, object]) -> FileEntry:
    size = reply["size"]
    return FileEntry(
        name=str(reply["name"]),
        path=str(reply["path"]),
        is_dir=bool(reply["is_dir"]),
        size=size if isinstance(size, int) else None,
    )


def _absolute(path: str) -> str:
    if not Path(path).is_absolute():
        raise ValueError(f"the path must be absolute, not {path!r}")
    return os.fspath(path)


class MovingWorkspace(BranchWorkspace):
    """The workspace of a run whose directory changes under it: a parent that forks goes on in a
    branch of its own. The path that it sees stays the same; what ran at the old place is ended.
    """

    def __init__(
        self,
        where: Callable[[], Path],
        *,
        seen_at: Path | None = None,
        ref: WorkspaceRef | None = None,
    ) -> None:
        self._where = where
        self._seen_at = seen_at
        super().__init__(BranchSandbox(where(), seen_at=seen_at), ref)

    def close(self) -> None:
        """Ends what runs in it."""
        self.sandbox.close()

    def _use(self) -> None:
        place = self._where()
        if place != self.sandbox.directory:
            self.sandbox.close()
            self.sandbox = BranchSandbox(place, seen_at=self._seen_at)
        super()._use()
