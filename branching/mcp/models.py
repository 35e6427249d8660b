"""What the tools answer with: one model each, whose fields are in the tool's output schema."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Literal

from mcp_types import ContentBlock, ImageContent, TextContent
from pydantic import BaseModel, Field, PrivateAttr, model_validator

from branching._caller import for_caller
from branching.fs import (
    PRIVILEGE_WARNINGS_MAX,
    BranchRecord,
    Change,
    CommitRecord,
    DiffSummary,
    Reversal,
    privilege_warnings,
)
from branching.mcp.background import PORTS, Started
from branching.mcp.bounded_output import BoundedOutput
from branching.mcp.execution import Raced, Ran
from branching.mcp.python_session import PythonSession
from branching.patterns import SpeculationResult
from branching.session import Cell

CHANGES_MAX = 150
"""Paths in one answer; the resource branching://branches/NAME/diff has them all."""
BRANCHES_MAX = 100
"""Branches in one answer."""
COMMAND_CHARACTERS_SHOWN_MAX = 500
"""Characters of a command in an answer; in that of a race fewer, if it has many candidates."""
COMMANDS_CHARACTERS_MAX = 5_000
"""Characters of the commands of all candidates of a race."""
CHANGES_BYTES_MAX = 10_000
"""Size of these paths: with long paths an answer lists fewer of them."""
VALUE_BYTES_MAX = 6_000
"""Size of a value or a traceback of a session; the rest of an answer is for its output."""


class Answer(BaseModel):
    """Base of all answers.

    Names that are not UTF-8 cannot travel as JSON. Their bytes are shown as `\\xNN`, so that an
    answer can always be sent: describing what was done must not fail after it was done.
    """

    @model_validator(mode="before")
    @classmethod
    def _escape(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: printable(value) if isinstance(value, str) else value
            for name, value in values.items()
        }

    def as_text(self) -> str:
        """Returns the answer as plain text, which is what most models read."""
        raise NotImplementedError

    def blocks(self) -> list[ContentBlock]:
        """Returns the content that stands beside the structure."""
        return [TextContent(type="text", text=self.as_text())]


class BranchInfo(Answer):
    """An open branch."""

    name: str
    path: str = Field(description="The branch as a directory, for tools that take file paths")
    place: str = Field(description="Parents and name, as in /main/outer/inner (not a file path)")
    state: str = Field(description='"live", or "stale" after a sibling was committed first')
    frozen: bool = Field(description="Read-only while it has open child branches")
    kept: bool = Field(description="It stays when this server ends; other branches are dropped")
    running: list[str] = Field(
        default=[], description="Ids of commands that run in it in the background"
    )

    @staticmethod
    def of(record: BranchRecord, *, kept: bool, running: Sequence[str] = ()) -> BranchInfo:
        return BranchInfo(
            name=record.name,
            path=str(record.path),
            place=record.branch_path,
            state=record.state,
            frozen=record.frozen,
            kept=kept,
            running=[*running],
        )

    def as_text(self) -> str:
        """Returns one line: name, state, path."""
        notes = [self.state] + ["read-only"] * self.frozen + ["kept"] * self.kept
        notes += [f"{number} runs" for number in self.running]
        return f"{self.name} ({', '.join(notes)}): {self.path}"


class Branches(Answer):
    """The workspace and its open branches."""

    workspace: str = Field(description="The directory as commands in a branch see it")
    policy: str = Field(description="Conflict policy for sibling branches")
    branches: list[BranchInfo] = Field(description=f"The last {BRANCHES_MAX} of them")
    left_out: int = Field(default=0, description="Number of older branches that are not listed")

    def as_text(self) -> str:
        """Returns a line for the workspace and one for each branch."""
        head = f"workspace {self.workspace}, policy {self.policy}"
        older = [f"... {self.left_out} older branches"] if self.left_out else []
        return "\n".join([head, *older, *(each.as_text() for each in self.branches)])


class PathChange(Answer):
    """One path that differs."""

    path: str
    change: str = Field(
        description='"added", "modified", "deleted", "renamed", "type" or "metadata"'
    )
    kind: str = Field(description='"file", "directory", "symlink" or "other"')
    origin: str | None = Field(None, description="Where a renamed path was before")

    @staticmethod
    def of(change: Change) -> PathChange:
        return PathChange(
            path=change.path, change=change.change, kind=change.kind, origin=change.origin
        )

    def as_text(self) -> str:
        """Returns one line in the manner of `git status`: `M path`."""
        mark = _MARKS.get(self.change, self.change)
        name = self.path + "/" * (self.kind == "directory")
        return f"{mark} {self.origin} -> {name}" if self.origin else f"{mark} {name}"


WARNINGS = "Committed files that give rights of their owner or group to users who execute them"
REST = "still open; changed paths that were not committed"


class Changes(Answer):
    """What a branch changed against its parent, or what a commit changed in it."""

    branch: str
    action: Literal["none", "committed", "aborted", "kept"] = "none"
    commit: int | None = Field(default=None, description="Id of the commit, for undo")
    remaining: int = Field(
        default=0,
        description="Changed paths that were not committed; the branch stays open with them",
    )
    summary: str = Field(description="How many paths, by kind of change")
    changes: list[PathChange] = Field(description=f"The first {CHANGES_MAX} of them")
    patch: str | None = Field(None, description="As a patch that git apply takes, if asked for")
    truncated: bool = Field(False, description="There are more changes, or the patch is cut off")
    warnings: list[str] = Field(default=[], description=WARNINGS)

    @staticmethod
    def of(
        branch: str,
        changes: list[Change],
        *,
        action: Literal["none", "committed", "aborted", "kept"] = "none",
        patch: str | None = None,
        truncated: bool = False,
    ) -> Changes:
        return Changes(
            branch=branch,
            action=action,
            summary=str(DiffSummary.of(changes)),
            changes=(listed := first_changes(changes)),
            patch=patch,
            truncated=truncated or len(listed) < len(changes),
            warnings=privilege_warnings(changes, PRIVILEGE_WARNINGS_MAX),
        )

    def as_text(self) -> str:
        """Returns what was done, the paths, and the patch."""
        done = "" if self.action == "none" else f" {self.action}"
        if self.commit is not None:
            done += f" as commit {self.commit}"
        rest = []
        if self.remaining and self.action == "committed":
            rest = [f"{REST}: {self.remaining}"]
        lines = [f"branch {self.branch}{done}: {self.summary}", *change_lines(self.changes)]
        if self.truncated:
            lines.append(f"... more in branching://branches/{self.branch}/diff")
        return "\n".join(lines + self.warnings + rest + ([self.patch] if self.patch else []))


class CommandResult(Answer):
    """How a command ended. The branch is as the command left it: nothing is committed yet."""

    branch: str
    exit_code: int
    success: bool = Field(description="It ended by itself with exit code 0")
    ended: str = Field(
        description='What ended it: "exit", "signal", "oom", "timeout", "disk", "pids", '
        '"cancelled", or "error" if it could not be started'
    )
    reason: str = Field(description="The same in words")
    output: str = Field(description="What it printed on both outputs, in order")
    truncated: bool = Field(
        description="The middle of the output is left out; the log has all of it"
    )
    log: str = Field(description="The resource with the whole output")
    seconds: float
    memory_peak: int | None = Field(None, description="Bytes")

    @staticmethod
    def of(branch: str, ran: Ran) -> CommandResult:
        ended = ran.ended
        return CommandResult(
            branch=branch,
            exit_code=ended.exit_code,
            success=ended.success,
            ended=ended.how,
            reason=ended.reason,
            output=ran.output.text,
            truncated=ran.output.characters_left_out > 0,
            log=log_uri(ran.log),
            seconds=round(ended.wall_seconds, 3),
            memory_peak=ended.memory_peak,
        )

    def as_text(self) -> str:
        """Returns how the command ended, and its output."""
        head = self.reason if self.ended != "exit" else f"exit code {self.exit_code}"
        head = f"{head} after {self.seconds:.1f} s"
        if self.truncated:
            head += f"; the whole output is in {self.log}"
        return f"{head}\n{self.output}" if self.output else head


class BackgroundCommand(Answer):
    """A command in the background, as it is now."""

    id: str = Field(description="For branch_output and branch_stop")
    branch: str
    command: str
    running: bool
    first_port: int = Field(
        description=f"The first of {PORTS} ports that only this command has; it is also in "
        "$BRANCHING_PORT_BASE"
    )
    reachable: bool = Field(
        description="Other commands and the user can connect to these ports. False: the server "
        "was started without --network, and only the command itself can"
    )
    exit_code: int | None = Field(None, description="After its end")
    reason: str | None = Field(None, description="How it ended, in words")
    output: str = Field(description="The beginning and the end of what it has printed so far")
    truncated: bool = Field(
        description="The middle of the output is left out; the log has all of it"
    )
    log: str = Field(description="The resource with the whole output")

    @staticmethod
    def of(started: Started, *, reachable: bool) -> BackgroundCommand:
        ended = started.ended
        return BackgroundCommand(
            id=started.id,
            branch=started.branch,
            command=shown_command(started.command),
            running=started.is_running,
            first_port=started.port_base,
            reachable=reachable,
            exit_code=None if ended is None else ended.exit_code,
            reason=started.error or (None if ended is None else ended.reason),
            output=started.output.text,
            truncated=started.output.characters_left_out > 0,
            log=log_uri(started.log),
        )

    def as_text(self) -> str:
        """Returns the state of the command, and its output."""
        state = "running" if self.running else f"ended: {self.reason}"
        ports = f"ports {self.first_port} to {self.first_port + PORTS - 1}"
        if not self.reachable:
            ports += ", for this command alone (the server was started without --network)"
        head = f"{self.id} in branch {self.branch} {state}" + (f"; {ports}" * self.running)
        if self.truncated:
            head += f"; the whole output is in {self.log}"
        return f"{head}\n{self.output}" if self.output else head


class CellResult(Answer):
    """What a piece of code did in a session."""

    child: int | None = Field(None, description="The child in which it ran; null is the session")
    success: bool = Field(description="It raised nothing")
    value: str | None = Field(None, description="The repr of the value of its last line")
    error: str | None = Field(None, description="The traceback of what it raised")
    output: str = Field(description="What it printed, then what it wrote to standard error")
    truncated: bool = Field(description="The middle of the output, or of the value, is left out")
    seconds: float

    @staticmethod
    def of(cell: Cell, *, child: int | None) -> CellResult:
        head, tail = VALUE_BYTES_MAX // 4, VALUE_BYTES_MAX - VALUE_BYTES_MAX // 4
        output, value, error = (BoundedOutput(head * n, tail * n) for n in (2, 1, 1))
        for stream in (cell.stdout, cell.stderr):
            if stream:
                output.add(stream.removesuffix("\n"))
        value.add(cell.text)
        if cell.exception is not None:
            error.add(str(cell.exception.__cause__ or repr(cell.exception)).strip())
        return CellResult(
            child=child,
            success=cell.success,
            value=value.text or None,
            error=error.text or None,
            output=output.text,
            truncated=any(each.characters_left_out for each in (output, value, error)),
            seconds=round(cell.wall_seconds, 3),
        )

    def as_text(self) -> str:
        """Returns the output, and the value or the traceback."""
        where = "the session" if self.child is None else f"child {self.child}"
        head = f"{where} {'ran' if self.success else 'failed'} after {self.seconds:.1f} s"
        parts = (head, self.output, self.value, self.error)
        return "\n".join(part for part in parts if part)


class SessionInfo(Answer):
    """The session after a fork."""

    branch: str = Field(description="The branch that has its files")
    children: list[int] = Field(description="Numbers of the children, for session_run")

    @staticmethod
    def of(live: PythonSession) -> SessionInfo:
        return SessionInfo(
            branch=live.branch.name, children=[child.index for child in live.children]
        )

    def as_text(self) -> str:
        """Returns one line: how many children, and their numbers."""
        numbers = ", ".join(map(str, self.children))
        return f"{len(self.children)} children ({numbers}) of the session in branch {self.branch}"


class Candidate(Answer):
    """One candidate of a race."""

    index: int
    command: str
    state: str = Field(
        description='"won", "succeeded" (but another one was chosen), "failed", "timed_out", '
        '"cancelled" (not needed any more) or "error"'
    )
    score: float | None = Field(None, description="Where there are scores")
    exit_code: int
    reason: str = Field(description="How it ended, in words")
    seconds: float
    changes: str | None = Field(None, description="How many paths it changed")
    output: str = Field(description="The beginning and the end of what it printed")
    truncated: bool = Field(
        description="The middle of the output is left out; the log has all of it"
    )
    log: str | None = Field(None, description="The resource with the whole output")

    @staticmethod
    def of(result: SpeculationResult, raced: Raced, *, scored: bool) -> Candidate:
        output = raced.outputs.get(result.branch_index)
        room = COMMANDS_CHARACTERS_MAX // max(1, len(raced.outcome.all_results))
        process, error = result.process, result.exception
        reason = str(error) if error else process.reason if process else result.state
        return Candidate(
            index=result.branch_index,
            command=shown_command(result.label, room),
            state=result.state,
            score=result.score if scored else None,
            exit_code=result.exit_code,
            reason=shown_command(reason),
            seconds=round(result.duration, 3),
            changes=None if result.changes is None else str(result.changes),
            output="" if output is None else output.text,
            truncated=output is not None and output.characters_left_out > 0,
            log=None if output is None else log_uri(result.branch_name),
        )

    def as_text(self) -> str:
        """Returns how the candidate ended, and its output."""
        score = "" if self.score is None else f", score {self.score:g}"
        changes = f", {self.changes}" if self.changes else ""
        head = f"[{self.index}] {self.state}: {self.reason}{score}{changes}: {self.command}"
        return f"{head}\n{self.output}" if self.output else head


class RaceResult(Answer):
    """What came of a race."""

    committed: bool = Field(description="The winner's changes are in the workspace now")
    winner: int | None = Field(description="Index of the winner; null if nothing succeeded")
    branch: str | None = Field(
        None,
        description="The winner's branch, if it was not committed, or not all of it: diff, commit "
        "or abort it",
    )
    remaining: int = Field(
        default=0,
        description="Changed paths of the winner that were not committed; its branch is open",
    )
    timed_out: bool = Field(description="The time was over before there was a winner")
    candidates: list[Candidate] = Field(description="In the order they were given")
    changes: list[PathChange] = Field(description=f"What was committed, up to {CHANGES_MAX} paths")
    summary: str
    warnings: list[str] = Field(default=[], description=WARNINGS)
    next: str | None = Field(None, description="How the winner's branch is committed")

    @staticmethod
    def of(raced: Raced, *, scored: bool, propose: bool) -> RaceResult:
        outcome = raced.outcome
        name = None if outcome.branch is None else outcome.branch.name
        how = None
        if name is not None and propose:
            how = f"review it with branch_diff; {user_commits(name)}"
        elif name is not None:
            how = (
                f'review it with branch_diff, then call branch_commit with branch="{name}", or '
                "branch_abort to drop it"
            )
        return RaceResult(
            committed=outcome.committed,
            winner=None if outcome.winner is None else outcome.winner.branch_index,
            branch=name,
            remaining=outcome.remaining,
            timed_out=outcome.timed_out,
            candidates=[
                Candidate.of(result, raced, scored=scored) for result in outcome.all_results
            ],
            changes=first_changes(outcome.changes),
            summary=str(DiffSummary.of(outcome.changes)),
            warnings=privilege_warnings(outcome.changes, PRIVILEGE_WARNINGS_MAX),
            next=how,
        )

    def as_text(self) -> str:
        """Returns the outcome of the race, then each candidate."""
        if self.winner is None:
            head = "no winner" + (": the time was over" if self.timed_out else "")
        elif self.committed:
            head = f"candidate {self.winner} won and was committed: {self.summary}"
            if self.remaining:
                head += f"\nbranch {self.branch}: {REST}: {self.remaining}"
        else:
            head = f"candidate {self.winner} won; its branch {self.branch} is open, not committed"
        if self.next:
            head += f"\nNext: {self.next}"
        candidates = [each.as_text() for each in self.candidates]
        return "\n".join([head, *change_lines(self.changes), *self.warnings, *candidates])


def user_commits(name: str) -> str:
    """Returns what to tell the user, where only the user commits."""
    word = shlex.quote(name)
    return for_caller(
        f"then tell the user to run `branching commit {word}` or `branching abort {word}`"
    )


class FileContent(Answer):
    """A part of a file."""

    branch: str
    path: str
    content: str = Field(
        description="Text, or base64 if the bytes are not UTF-8; empty for an image"
    )
    encoding: Literal["utf-8", "base64", "image"] = Field(
        description='"image": the answer has the file as image content beside this'
    )
    offset: int = Field(description="Where in the file the content begins, in bytes")
    size: int = Field(description="Bytes of the whole file")
    truncated: bool = Field(description="The file continues: ask again with offset + bytes read")
    next_offset: int | None = Field(None, description="Offset at which to continue reading")
    _image: ImageContent | None = PrivateAttr(None)

    def with_image(self, data: bytes, mime_type: str) -> FileContent:
        """Adds the image that the answer shows."""
        shown = base64.b64encode(data).decode()
        self._image = ImageContent(type="image", data=shown, mime_type=mime_type)
        return self

    def blocks(self) -> list[ContentBlock]:
        """Returns the text, and the image."""
        return [*super().blocks(), *([self._image] if self._image else [])]

    def as_text(self) -> str:
        """Returns the content; a last line says where it goes on."""
        if self._image is not None:
            return f"[{self._image.mime_type}, {self.size} bytes]"
        head = "" if self.encoding == "utf-8" else f"[base64 of {self.size} bytes]\n"
        more = (
            f"\n[continues at offset {self.next_offset} of {self.size}]" if self.truncated else ""
        )
        return f"{head}{self.content}{more}"


class FileWritten(Answer):
    """What became of a file."""

    branch: str
    path: str
    created: bool = Field(description="It was not there before")
    size: int = Field(description="Bytes it has now")

    def as_text(self) -> str:
        """Returns one line."""
        return f"{'created' if self.created else 'wrote'} {self.path}: {self.size} bytes"


class FileEdited(Answer):
    """What became of a file in which a text was replaced."""

    branch: str
    path: str
    line: int = Field(description="The line in which the replaced text began")
    size: int = Field(description="Bytes it has now")

    def as_text(self) -> str:
        """Returns one line."""
        return f"edited {self.path} at line {self.line}: {self.size} bytes"


class FileEntry(Answer):
    """One name in a directory."""

    name: str
    kind: str = Field(description='"file", "directory", "symlink" or "other"')
    size: int = Field(description="Bytes, of a file")

    def as_text(self) -> str:
        """Returns one line: a directory's name ends with a slash."""
        if self.kind == "file":
            return f"{self.name} {self.size}"
        return f"{self.name}/" if self.kind == "directory" else f"{self.name} ({self.kind})"


class Listing(Answer):
    """A directory."""

    branch: str
    path: str
    entries: list[FileEntry]
    truncated: bool = Field(description="There are more names than are listed")

    def as_text(self) -> str:
        """Returns the names, one a line."""
        more = [f"... more after {self.entries[-1].name!r}"] if self.truncated else []
        return "\n".join([*(each.as_text() for each in self.entries), *more]) or "(empty)"


class CommitInfo(Answer):
    """A commit to the workspace that can be taken back, or made again."""

    id: int
    branch: str = Field(description="Name of the branch that was committed")
    committed: float = Field(description="Unix time")
    undone: bool
    paths: int = Field(description="How many paths it changed")

    @staticmethod
    def of(record: CommitRecord) -> CommitInfo:
        return CommitInfo(
            id=record.id,
            branch=record.branch,
            committed=record.committed,
            undone=record.undone is not None,
            paths=record.changes,
        )

    def as_text(self) -> str:
        """Returns one line: id, time, branch, number of paths."""
        when = datetime.fromtimestamp(self.committed, tz=timezone.utc).isoformat(" ", "seconds")
        undone = ", undone" if self.undone else ""
        return f"{self.id} {when} {self.branch}: {self.paths} paths{undone}"


class History(Answer):
    """The commits that are kept, the oldest first."""

    commits: list[CommitInfo]

    def as_text(self) -> str:
        """Returns a line for each commit, the oldest first."""
        return "\n".join(each.as_text() for each in self.commits) or "no commits"


class Reverted(Answer):
    """What an undo or a redo did, or would do."""

    commit: CommitInfo
    done: bool = Field(description="False: it was only asked what would be done")
    summary: str
    changes: list[PathChange] = Field(description=f"Up to {CHANGES_MAX} paths of the workspace")

    @staticmethod
    def of(reversal: Reversal, *, done: bool) -> Reverted:
        return Reverted(
            commit=CommitInfo.of(reversal.commit),
            done=done,
            summary=str(DiffSummary.of(reversal.changes)),
            changes=first_changes(reversal.changes),
        )

    def as_text(self) -> str:
        """Returns the commit and the changes in the workspace."""
        head = f"{'reverted' if self.done else 'would change'}: {self.summary}"
        return "\n".join([head, self.commit.as_text(), *change_lines(self.changes)])


_MARKS = {
    "added": "A",
    "modified": "M",
    "deleted": "D",
    "renamed": "R",
    "type": "T",
    "metadata": "m",
}


def change_lines(changes: list[PathChange]) -> list[str]:
    """Returns a line for each change."""
    return [change.as_text() for change in changes]


def first_changes(changes: list[Change]) -> list[PathChange]:
    """Returns the first changes, as many as an answer has room for."""
    listed: list[PathChange] = []
    room = CHANGES_BYTES_MAX
    for change in changes[:CHANGES_MAX]:
        room -= len(os.fsencode(change.path)) + len(os.fsencode(change.origin or ""))
        if room < 0:
            break
        listed.append(PathChange.of(change))
    return listed


def printable(text: str) -> str:
    """Returns the text with bytes that are not UTF-8 written as `\\xNN`."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other lone surrogates, which a client can send
        data = text.encode("utf-8", "backslashreplace")
    return data.decode("utf-8", "backslashreplace")


def shown_command(command: str, room: int = COMMAND_CHARACTERS_SHOWN_MAX) -> str:
    """Returns a command as an answer shows it: the middle of a long one is left out."""
    room = min(room, COMMAND_CHARACTERS_SHOWN_MAX)
    if len(command) <= room:
        return command
    return f"{command[: room // 2]} ... {command[len(command) - room // 2 :]}"


def log_uri(name: str) -> str:
    """Returns the resource of a log."""
    from urllib.parse import quote

    return f"branching://logs/{quote(name, safe='')}"
