"""The tools for files: whoever cannot, or need not, run a command reads and writes with these."""

from __future__ import annotations

import base64
from functools import partial
from typing import Annotated

from pydantic import Field

from branching.errors import BranchError
from branching.mcp.answers import FileContent, FileEntry, FileWritten, Listing
from branching.mcp.desk import MAIN
from branching.mcp.failure import told
from branching.mcp.parameters import BranchName, BranchOrMain, FilePath
from branching.mcp.roots import AllowedDesk
from branching.mcp.work import step

READ_BYTES_MAX = 256 << 10
WRITE_BYTES_MAX = 2 << 20
"""Below what a message may have over HTTP."""
ENTRIES_MAX = 1000


@told
async def branch_read(
    desk: AllowedDesk,
    branch: BranchOrMain,
    path: FilePath,
    offset: Annotated[int, Field(ge=0, lt=1 << 63, description="Bytes to skip")] = 0,
    limit: Annotated[int, Field(ge=1, le=READ_BYTES_MAX, description="Bytes to read")] = 64 << 10,
) -> FileContent:
    """Read a file as it is in a branch, or in the workspace."""
    tree = await desk.tree(branch, path)
    data, size = await step(partial(tree.read, path, offset=offset, limit=limit))
    text = _text(data, is_cut=offset + len(data) < size)
    if text is not None:
        data = text.encode()
    end = offset + len(data)
    return FileContent(
        branch=branch,
        path=path,
        content=base64.b64encode(data).decode() if text is None else text,
        encoding="base64" if text is None else "utf-8",
        offset=offset,
        size=size,
        truncated=end < size,
        next_offset=end if end < size else None,
    )


@told
async def branch_write(
    desk: AllowedDesk,
    branch: BranchName,
    path: FilePath,
    content: Annotated[str, Field(max_length=WRITE_BYTES_MAX)],
    is_base64: Annotated[bool, Field(description="The content is base64, of any bytes")] = False,
    executable: Annotated[
        bool | None, Field(description="Set or take the bits to execute it; null leaves them")
    ] = None,
) -> FileWritten:
    """Write a whole file in a branch, making the directories on the way. A file that was there
    keeps its mode.
    """
    data = base64.b64decode(content, validate=True) if is_base64 else content.encode()
    if branch == MAIN:
        raise BranchError(
            "the workspace itself is not written to: it changes by commits alone",
            hint="branch_create makes a branch to write in",
        )
    tree = await desk.tree(branch, path)
    created = await step(partial(tree.write, path, data, is_executable=executable))
    return FileWritten(branch=branch, path=path, created=created, size=len(data))


@told
async def branch_files(desk: AllowedDesk, branch: BranchOrMain, path: FilePath = ".") -> Listing:
    """List a directory as it is in a branch, or in the workspace."""
    tree = await desk.tree(branch, path)
    entries, is_all = await step(partial(tree.entries, path, limit=ENTRIES_MAX))
    return Listing(
        branch=branch,
        path=path,
        entries=[FileEntry(name=each.name, kind=each.kind, size=each.size) for each in entries],
        truncated=not is_all,
    )


def _text(data: bytes, *, is_cut: bool) -> str | None:
    """Returns the bytes as text, without a character that is cut off; None if they are none."""
    for end in range(len(data), max(len(data) - 4, -1) if is_cut else len(data) - 1, -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None
