"""What the tools answer with: one model each, whose fields are in the tool's output schema."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from branching.fs import BranchRecord, Change, CommitRecord, DiffSummary, Reversal
from branching.mcp.commands import Raced, Ran
from branching.patterns import SpeculationResult

CHANGES_MAX = 500
"""Paths in one answer; the resource branching://branches/NAME/diff has them all."""


class BranchInfo(BaseModel):
    """An open branch."""

    name: str
    place: str = Field(description="Its place in the tree of branches: /main/outer/inner")
    state: str = Field(description='"live"; "stale" once a sibling was committed first')
    frozen: bool = Field(description="It has open children, and cannot be written to meanwhile")
    kept: bool = Field(description="It stays when this server ends; otherwise it is dropped then")

    @staticmethod
    def of(record: BranchRecord, *, kept: bool) -> BranchInfo:
        return BranchInfo(
            name=record.name,
            place=record.branch_path,
            state=record.state,
            frozen=record.frozen,
            kept=kept,
        )


class Branches(BaseModel):
    """The workspace and its open branches."""

    workspace: str = Field(description="The directory as commands in a branch see it")
    policy: str = Field(description="What a commit means for the siblings of the branch")
    branches: list[BranchInfo]


class PathChange(BaseModel):
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


class Changes(BaseModel):
    """What a branch changed against its parent, or what a commit changed in it."""

    branch: str
    action: Literal["none", "committed", "aborted", "kept"] = "none"
    summary: str = Field(description="How many paths, by kind of change")
    changes: list[PathChange] = Field(description=f"The first {CHANGES_MAX} of them")
    patch: str | None = Field(None, description="As a patch that git apply takes, if asked for")
    truncated: bool = Field(False, description="There are more changes, or the patch is cut off")

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
            changes=[PathChange.of(change) for change in changes[:CHANGES_MAX]],
            patch=patch,
            truncated=truncated or len(changes) > CHANGES_MAX,
        )


class CommandResult(BaseModel):
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
    truncated: bool = Field(description="Lines in the middle are left out; the log has them all")
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
            truncated=ran.output.lines_left_out > 0,
            log=log_uri(ran.log),
            seconds=round(ended.wall_seconds, 3),
            memory_peak=ended.memory_peak,
        )


class Candidate(BaseModel):
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
    truncated: bool = Field(description="Lines of the output are left out; the log has them all")
    log: str | None = Field(None, description="The resource with the whole output")

    @staticmethod
    def of(result: SpeculationResult, raced: Raced, *, scored: bool) -> Candidate:
        output = raced.outputs.get(result.branch_index)
        process, error = result.process, result.exception
        reason = str(error) if error else process.reason if process else result.state
        return Candidate(
            index=result.branch_index,
            command=result.label,
            state=result.state,
            score=result.score if scored else None,
            exit_code=result.exit_code,
            reason=reason,
            seconds=round(result.duration, 3),
            changes=None if result.changes is None else str(result.changes),
            output="" if output is None else output.text,
            truncated=output is not None and output.lines_left_out > 0,
            log=None if output is None else log_uri(result.branch_name),
        )


class RaceResult(BaseModel):
    """What came of a race."""

    committed: bool = Field(description="The winner's changes are in the workspace now")
    winner: int | None = Field(description="Index of the winner; null if nothing succeeded")
    branch: str | None = Field(
        None, description="The winner's branch, if it was not committed: diff, commit or abort it"
    )
    timed_out: bool = Field(description="The time was over before there was a winner")
    candidates: list[Candidate] = Field(description="In the order they were given")
    changes: list[PathChange] = Field(description=f"What was committed, up to {CHANGES_MAX} paths")
    summary: str

    @staticmethod
    def of(raced: Raced, *, scored: bool) -> RaceResult:
        outcome = raced.outcome
        return RaceResult(
            committed=outcome.committed,
            winner=None if outcome.winner is None else outcome.winner.branch_index,
            branch=None if outcome.branch is None else outcome.branch.name,
            timed_out=outcome.timed_out,
            candidates=[
                Candidate.of(result, raced, scored=scored) for result in outcome.all_results
            ],
            changes=[PathChange.of(change) for change in outcome.changes[:CHANGES_MAX]],
            summary=str(DiffSummary.of(outcome.changes)),
        )


class FileContent(BaseModel):
    """A part of a file."""

    branch: str
    path: str
    content: str = Field(description="Text, or base64 where the bytes are no UTF-8")
    encoding: Literal["utf-8", "base64"]
    offset: int = Field(description="Where in the file the content begins, in bytes")
    size: int = Field(description="Bytes of the whole file")
    truncated: bool = Field(description="The file goes on: ask again with offset + bytes read")
    next_offset: int | None = Field(None, description="Where to go on reading")


class FileWritten(BaseModel):
    """What became of a file."""

    branch: str
    path: str
    created: bool = Field(description="It was not there before")
    size: int = Field(description="Bytes it has now")


class FileEntry(BaseModel):
    """One name in a directory."""

    name: str
    kind: str = Field(description='"file", "directory", "symlink" or "other"')
    size: int = Field(description="Bytes, of a file")


class Listing(BaseModel):
    """A directory."""

    branch: str
    path: str
    entries: list[FileEntry]
    truncated: bool = Field(description="There are more names than are listed")


class CommitInfo(BaseModel):
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


class History(BaseModel):
    """The commits that are kept, the oldest first."""

    commits: list[CommitInfo]


class Reverted(BaseModel):
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
            changes=[PathChange.of(change) for change in reversal.changes[:CHANGES_MAX]],
        )


def log_uri(name: str) -> str:
    """Returns the resource of a log."""
    from urllib.parse import quote

    return f"branching://logs/{quote(name, safe='')}"
