"""Tools that read and write files without running a command."""

from __future__ import annotations

import base64
import os
from functools import partial
from typing import Annotated

from pydantic import Field

from branching.errors import BranchError
from branching.mcp.models import FileContent, FileEdited, FileEntry, FileWritten, Listing
from branching.mcp.parameters import BranchName, BranchOrMain, FilePath
from branching.mcp.roots import AllowedSession
from branching.mcp.worker_threads import run_short
from branching.mcp.workspace_session import MAIN

READ_BYTES_MAX = 32 << 10
"""Maximum per call. The content is in the answer twice: as text and as structure."""
READ_BINARY_BYTES_MAX = 12 << 10
"""Maximum of what is no text: a model reads base64 as a token for one or two characters."""
WRITE_BYTES_MAX = 2 << 20
"""Below the size limit of an HTTP message."""
IMAGE_BYTES_MAX = 1 << 20
"""A larger image is read in parts, as base64."""
ENTRIES_MAX = 500
ENTRIES_BYTES_MAX = 12_000
"""Maximum total size of the names in a listing."""
LINES_NAMED_MAX = 10
_NOT_MAIN = (
    "the workspace itself is not written to: it changes by commits alone. Nothing was changed"
)
_MAKE_BRANCH = "branch_create makes a branch to write in"
_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
)


async def branch_read(
    session: AllowedSession,
    branch: BranchOrMain,
    path: FilePath,
    offset: Annotated[int, Field(ge=0, lt=1 << 63, description="Bytes to skip")] = 0,
    limit: Annotated[
        int,
        Field(
            ge=1,
            lt=1 << 63,
            description=f"Bytes to read; at most {READ_BYTES_MAX} a call, of what is no text "
            f"{READ_BINARY_BYTES_MAX}",
        ),
    ] = 16 << 10,
) -> FileContent:
    """Read a file as it is in a branch, or in the workspace (branch "main"). An image (PNG, JPEG,
    GIF, WebP) is shown as an image; another file that is not UTF-8 text is returned as base64.
    Continue a long file with offset=next_offset.
    """
    limit = min(limit, READ_BYTES_MAX)
    tree = await session.tree(branch, path)
    data, size = await run_short(partial(tree.read, path, offset=offset, limit=limit))
    if offset == 0 and size <= IMAGE_BYTES_MAX and (mime_type := _image_type(data)):
        data, size = await run_short(partial(tree.read, path, offset=0, limit=IMAGE_BYTES_MAX))
        return FileContent(
            branch=branch,
            path=path,
            content="",
            encoding="image",
            offset=0,
            size=size,
            truncated=False,
            next_offset=None,
        ).with_image(data, mime_type)
    text = _text(data, is_cut=offset + len(data) < size)
    data = data[:READ_BINARY_BYTES_MAX] if text is None else text.encode()
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


async def branch_write(
    session: AllowedSession,
    branch: BranchName,
    path: FilePath,
    content: Annotated[
        str,
        Field(max_length=WRITE_BYTES_MAX, description="The whole new content of the file"),
    ],
    is_base64: Annotated[bool, Field(description="`content` is base64, for any bytes")] = False,
    executable: Annotated[
        bool | None,
        Field(
            description="true makes the file executable, false makes it non-executable; omit to "
            "leave its mode unchanged"
        ),
    ] = None,
) -> FileWritten:
    """Create a file in a branch, or replace its whole content. Missing directories are created.
    An existing file keeps its mode.
    """
    data = base64.b64decode(content, validate=True) if is_base64 else content.encode()
    if branch == MAIN:
        raise BranchError(_NOT_MAIN, hint=_MAKE_BRANCH)
    tree = await session.tree(branch, path)
    created = await run_short(partial(tree.write, path, data, is_executable=executable))
    return FileWritten(branch=branch, path=path, created=created, size=len(data))


async def branch_edit(
    session: AllowedSession,
    branch: BranchName,
    path: FilePath,
    old: Annotated[
        str,
        Field(
            min_length=1,
            max_length=WRITE_BYTES_MAX,
            description="The exact text to replace, with its whitespace; it must occur once in the "
            "file, so include enough lines around the change",
        ),
    ],
    new: Annotated[
        str, Field(max_length=WRITE_BYTES_MAX, description="The text to put in its place")
    ],
) -> FileEdited:
    """Replace a text in a file of a branch. The call is refused, and nothing is changed, unless
    the text occurs exactly once.
    """
    if branch == MAIN:
        raise BranchError(_NOT_MAIN, hint=_MAKE_BRANCH)
    tree = await session.tree(branch, path)
    before, size = await run_short(partial(tree.read, path, offset=0, limit=WRITE_BYTES_MAX))
    if size > WRITE_BYTES_MAX:
        raise BranchError(
            f"{path} was not edited: it has {size} bytes, and at most {WRITE_BYTES_MAX} can be "
            "edited",
            hint="edit it with branch_run, for example with sed",
        )
    sought = old.encode()
    at = before.find(sought)
    if at < 0:
        raise BranchError(
            f"{path} was not edited: the text in `old` does not occur in it",
            hint="branch_read shows the file; the text must be exact, with its whitespace",
        )
    if (count := before.count(sought)) > 1:
        raise BranchError(
            f"{path} was not edited: the text in `old` occurs {count} times "
            f"({_lines_of(before, sought)})",
            hint="put more of the lines around it into `old` and `new`",
        )
    after = before[:at] + new.encode() + before[at + len(sought) :]
    await run_short(partial(tree.write, path, after))
    line = before.count(b"\n", 0, at) + 1
    return FileEdited(branch=branch, path=path, line=line, size=len(after))


async def branch_files(
    session: AllowedSession,
    branch: BranchOrMain,
    path: FilePath = ".",
    after: Annotated[
        str, Field(description="Start after this name: the last one of a truncated listing")
    ] = "",
) -> Listing:
    """List a directory as it is in a branch, or in the workspace (branch "main"), by name."""
    tree = await session.tree(branch, path)
    entries, is_all = await run_short(partial(tree.entries, path, limit=ENTRIES_MAX, after=after))
    room = ENTRIES_BYTES_MAX
    listed = []
    for each in entries:
        room -= len(os.fsencode(each.name))
        if room < 0:
            is_all = False
            break
        listed.append(FileEntry(name=each.name, kind=each.kind, size=each.size))
    return Listing(branch=branch, path=path, entries=listed, truncated=not is_all)


def _image_type(data: bytes) -> str | None:
    """Returns the MIME type of an image by its first bytes; None for anything else."""
    for start, mime_type in _IMAGES:
        if data.startswith(start):
            return mime_type
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _lines_of(data: bytes, sought: bytes) -> str:
    """Returns the numbers of the lines in which a text begins, for a message."""
    lines: list[str] = []
    at = data.find(sought)
    while at >= 0 and len(lines) < LINES_NAMED_MAX:
        lines.append(str(data.count(b"\n", 0, at) + 1))
        at = data.find(sought, at + len(sought))
    return f"lines {', '.join(lines)}" + (", ..." if at >= 0 else "")


def _text(data: bytes, *, is_cut: bool) -> str | None:
    """Returns the bytes as text, without a character cut off at the end; None if not UTF-8."""
    for end in range(len(data), max(len(data) - 4, -1) if is_cut else len(data) - 1, -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None
