"""Edits, images and chosen paths: what the file tools and the diff do, with both protocols."""

from __future__ import annotations

import base64
import struct
import zlib

import mcp_types
import pytest
from support.tools import connected, served

from branching import Workspace

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_an_edit_replaces_a_text_that_occurs_once(
    real_workspace: Workspace, mode: str
) -> None:
    program = real_workspace.base / "go.sh"
    program.write_bytes("one\nzwei été\nthree\xff\n".encode("latin-1"))
    program.chmod(0o750)
    async with connected(served(real_workspace), mode=mode) as agent:
        await agent.call("branch_create", name="b")
        edited = await agent.call(
            "branch_edit", branch="b", path="go.sh", old="one\n", new="1\n2\n"
        )
        assert edited == {"branch": "b", "path": "go.sh", "line": 1, "size": 20}
        edited = await agent.call("branch_edit", branch="b", path="go.sh", old="three", new="3")
        assert edited["line"] == 4
        assert program.read_bytes().startswith(b"one\n")  # the workspace is as it was
        await agent.call("branch_commit", branch="b")
    assert program.read_bytes() == "1\n2\nzwei été\n3\xff\n".encode("latin-1")
    assert program.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("path", "old", "says"),
    [
        ("seed.txt", "seeds", "does not occur in it\nNext: branch_read"),
        ("many", "a", "occurs 4 times (lines 1, 1, 2, 4)\nNext: put more of the lines"),
        ("none", "x", "Next: branch_files lists"),
        ("../x", "x", "stay in it"),
        (".", "x", "Next: branch_files"),
        ("seed.txt", "", "old: "),
    ],
)
async def test_a_refused_edit_changes_nothing(
    real_workspace: Workspace, path: str, old: str, says: str
) -> None:
    (real_workspace.base / "many").write_text("aa\na\n\na\n")
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        assert says in await agent.refused("branch_edit", branch="b", path=path, old=old, new="y")
        assert (await agent.call("branch_diff", branch="b"))["changes"] == []
        said = await agent.refused("branch_edit", branch="main", path="seed.txt", old="s", new="y")
        assert "changes by commits alone" in said


def png(size: int) -> bytes:
    """A picture, so many bytes long."""

    def part(kind: bytes, data: bytes) -> bytes:
        head = struct.pack(">I", len(data)) + kind + data
        return head + struct.pack(">I", zlib.crc32(kind + data))

    parts = part(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    parts += part(b"IDAT", zlib.compress(b"\0\0")) + part(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + parts
    return data + b"\0" * (size - len(data))


async def test_an_image_is_shown_as_one(real_workspace: Workspace, mode: str) -> None:
    picture = png(100_000)  # more than is read of other files
    (real_workspace.base / "a.png").write_bytes(picture)
    (real_workspace.base / "big.png").write_bytes(png((1 << 20) + 1))
    (real_workspace.base / "b.webp").write_bytes(b"RIFF\x04\0\0\0WEBPxxxx")
    async with connected(served(real_workspace), mode=mode) as agent:
        answer = await agent.client.call_tool("branch_read", {"branch": "main", "path": "a.png"})
        text, image = answer.content
        assert isinstance(text, mcp_types.TextContent)
        assert text.text == "[image/png, 100000 bytes]"
        assert isinstance(image, mcp_types.ImageContent)
        assert (image.mime_type, base64.b64decode(image.data)) == ("image/png", picture)
        assert answer.structured_content is not None
        assert answer.structured_content["encoding"] == "image"
        assert answer.structured_content["content"] == ""  # it is sent once
        webp = await agent.client.call_tool("branch_read", {"branch": "main", "path": "b.webp"})
        assert isinstance(webp.content[1], mcp_types.ImageContent)
        assert webp.content[1].mime_type == "image/webp"
        read = await agent.call("branch_read", branch="main", path="big.png")
        assert (read["encoding"], read["truncated"]) == ("base64", True)


async def test_a_diff_shows_the_paths_that_are_asked_for(
    real_workspace: Workspace, mode: str
) -> None:
    script = """
mkdir -p src/deep 'with space' && echo x >src/a.py && echo x >src/deep/b.py && echo x >notes.md
echo x >'with space/été.py' && mv seed.txt moved.txt && printf 'b/\\303\\251' >'q"b/x.py'
"""
    async with connected(served(real_workspace), mode=mode) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command=script.replace("b/x", "b-x"))
        for paths, found in (
            (["src/*.py"], ["src/a.py"]),
            (["src"], ["src", "src/a.py", "src/deep", "src/deep/b.py"]),
            (["b.py", "/notes.md"], ["notes.md", "src/deep/b.py"]),
            (["with space/*"], ["with space/été.py"]),
            (['q"*'], ['q"b-x.py']),
            (["moved.txt"], ["moved.txt"]),
            (["seed.txt"], ["moved.txt"]),
            (["none"], []),
        ):
            diff = await agent.call("branch_diff", branch="b", paths=paths, patch=True)
            assert [each["path"] for each in diff["changes"]] == found, paths
            files = [path for path in found if not path.startswith("src") or path.endswith(".py")]
            shown = 0 if paths == ["seed.txt"] else len(files)  # by its new name alone
            assert diff["patch"].count("diff --git ") == shown, diff["patch"]
