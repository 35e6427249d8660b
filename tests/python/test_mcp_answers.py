"""Answers of the tools: correct, bounded in size, with plain text beside the structure."""

from __future__ import annotations

import json
import os
from typing import Any

import mcp_types
import pytest
from mcp.shared.exceptions import MCPError
from support.tools import Agent, connected, served

from branching import ResourceLimits, Workspace
from branching.mcp.bounded_output import BoundedOutput
from branching.mcp.models import CHANGES_BYTES_MAX, CHANGES_MAX, printable
from branching.mcp.tools import make_tools
from branching.patterns.command_candidate import LineSplitter

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

CHARACTERS_MAX = 40_000
"""Of either form of an answer: both together stay below 20,000 tokens of four characters."""
BINARY_CHARACTERS_MAX = 17_000
"""Of base64 as a part of one: below 20,000 tokens even if every token is one character."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answer_of(agent: Agent, tool: str, **arguments: Any) -> tuple[str, str]:
    """Returns both forms of an answer: the text, and the structure as JSON."""
    answer = await agent.client.call_tool(tool, arguments)
    (content,) = answer.content
    assert isinstance(content, mcp_types.TextContent)
    assert not answer.is_error, content.text
    return content.text, json.dumps(answer.structured_content)


async def test_a_commit_of_names_that_are_not_utf8_is_reported_as_a_commit(
    real_workspace: Workspace,
) -> None:
    odd = os.fsdecode(b"x\xff")
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command="touch \"$(printf 'x\\377')\"")
        listed = await agent.call("branch_files", branch="b")
        assert "x\\xff" in [each["name"] for each in listed["entries"]]
        diff = await agent.call("branch_diff", branch="b", patch=True)
        assert [each["path"] for each in diff["changes"]] == ["x\\xff"]
        committed = await agent.call("branch_commit", branch="b")
        assert [each["path"] for each in committed["changes"]] == ["x\\xff"]
        assert (real_workspace.base / odd).exists()
        undone = await agent.call("branch_undo")
        assert [each["path"] for each in undone["changes"]] == ["x\\xff"]
        assert not (real_workspace.base / odd).exists()
        raced = await agent.call(
            "branch_speculate", candidates=["touch \"$(printf 'y\\376')\""], commit=True
        )
        assert [each["path"] for each in raced["changes"]] == ["y\\xfe"]
        assert raced["committed"]


def test_lone_surrogates_of_any_kind_are_printable() -> None:
    assert printable("a\udcffb") == "a\\xffb"
    assert printable("a\ud800b").encode() == b"a\\ud800b"


async def test_a_refused_conflict_lists_names_that_are_not_utf8(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command="echo b >\"$(printf 'x\\377')\"")
        (real_workspace.base / os.fsdecode(b"x\xff")).write_text("base\n")
        assert "x\\xff" in await agent.refused("branch_commit", branch="b")


async def test_a_write_that_meets_the_disk_limit_takes_its_directories_back(
    real_workspace: Workspace,
) -> None:
    limits = ResourceLimits(disk=1 << 20)
    async with connected(served(real_workspace, limits=limits)) as agent:
        await agent.call("branch_create", name="b")
        text = await agent.refused(
            "branch_write", branch="b", path="d/e/f", content="x" * 1_900_000
        )
        assert "limit on disk space" in text
        assert (await agent.call("branch_diff", branch="b"))["changes"] == []


@pytest.mark.parametrize("pieces", [1, 7, 100])
def test_output_keeps_the_beginning_and_the_end_of_one_long_line(pieces: int) -> None:
    text = json.dumps(list(range(6000)))
    output = BoundedOutput(100, 300)
    for line in [text] * pieces:
        output.add(line)
    assert output.text.startswith(text[:100])
    assert output.text.endswith(text[-300:])
    whole = len("\n".join([text] * pieces))
    assert f"[{whole - 400} characters left out]" in output.text


@pytest.mark.parametrize("character", ["é", "中", "😀"])
def test_characters_beyond_ascii_count_by_their_bytes_and_are_never_halved(character: str) -> None:
    output = BoundedOutput(101, 303)
    for piece in range(1, 60):
        output.add(character * piece)
    head, gap, tail = output.text.split("\n[")[0], *output.text.split("[")[1].split("]\n")
    assert 97 < len(head.encode()) <= 101
    assert 299 < len(tail.encode()) <= 303
    assert set(head + tail) == {character, "\n"}
    whole = sum(range(1, 60)) + 58
    assert gap == f"{whole - len(head) - len(tail)} characters left out"


def test_control_sequences_are_left_out_and_other_controls_are_visible() -> None:
    output = BoundedOutput()
    output.add("\x1b[1;31mred\x1b[0m\tand \x1b]0;title\x07plain\x01\r")
    assert output.text == "red\tand plain^A\r"


async def test_a_model_gets_no_colours_and_the_log_has_them(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        ran = await agent.call("branch_run", branch="b", command="printf '\\033[31mred\\033[0m'")
        assert ran["output"] == "red"
        assert await agent.text_of(ran["log"]) == "\x1b[31mred\x1b[0m\n"
        assert not any("\x1b" in message for message in agent.heard)


def test_output_that_fits_is_kept_as_it_is() -> None:
    output = BoundedOutput(4, 4)
    for line in ("", "ab", "", "cd"):
        output.add(line)
    assert output.text == "\nab\n\ncd"
    assert output.characters_left_out == 0


async def test_a_long_line_of_a_command_is_shown_from_both_ends(real_workspace: Workspace) -> None:
    command = "python3 -c 'import json; print(json.dumps(list(range(6000))))'"
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        ran = await agent.call("branch_run", branch="b", command=command)
        assert ran["output"].startswith("[0, 1, 2,")
        assert ran["output"].endswith("5998, 5999]")
        raced = await agent.call("branch_speculate", candidates=[command], commit=False)
        (candidate,) = raced["candidates"]
        assert candidate["output"].endswith("5998, 5999]")


@pytest.mark.parametrize("path", ["fresh/../../x", "new/dir/" + "n" * 300, "new//x", "a/./b"])
async def test_a_refused_write_creates_no_directory(real_workspace: Workspace, path: str) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.refused("branch_write", branch="b", path=path, content="x")
        assert (await agent.call("branch_diff", branch="b"))["changes"] == []


async def test_a_write_that_fails_late_takes_its_directories_back(
    real_workspace: Workspace,
) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command="ln -s / way; mkdir -p d/there")
        before = await agent.call("branch_diff", branch="b")
        await agent.refused("branch_write", branch="b", path="way/x/y", content="x")
        await agent.refused("branch_write", branch="b", path="d/there", content="x")
        await agent.refused("branch_write", branch="b", path="d/one/../x", content="x")
        assert await agent.call("branch_diff", branch="b") == before


async def test_every_tool_refuses_arguments_that_it_does_not_have(
    real_workspace: Workspace,
) -> None:
    assert all(tool.parameters["additionalProperties"] is False for tool in make_tools())
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="f", content="x")
        text = await agent.refused("branch_commit", branch="b", dryrun=True)
        assert "there is no argument 'dryrun'" in text
        assert "dry_run" in text.partition("Next: ")[2]
        assert not (real_workspace.base / "f").exists()
        assert [each["name"] for each in (await agent.call("branch_list"))["branches"]] == ["b"]


@pytest.mark.parametrize(
    ("tool", "arguments", "fault"),
    [
        ("branch_read", {"branch": "b"}, "the argument 'path' is missing"),
        ("branch_run", {"branch": "b", "command": ""}, "command: "),
        ("branch_run", {"branch": "b", "command": "true", "timeout_seconds": -1}, "seconds: "),
        ("branch_speculate", {"candidates": []}, "candidates: "),
        (
            "branch_best_of_n",
            {"candidates": ["true", "false"], "n": 2},
            "n is for a single command",
        ),
        ("branch_write", {"branch": "b", "path": "f", "content": "!", "is_base64": True}, ""),
    ],
)
async def test_refused_arguments_are_named_with_what_holds(
    real_workspace: Workspace, tool: str, arguments: dict[str, Any], fault: str
) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        text = await agent.refused(tool, **arguments)
        assert fault in text
        assert "Nothing was done." in text
        for word in ("pydantic", "validation error", "input_value", "Error executing"):
            assert word not in text


async def test_answers_stay_within_what_a_client_accepts(real_workspace: Workspace) -> None:
    base = real_workspace.base
    for number in range(1000):
        (base / f"{number:04}{'n' * 60}").touch()
    (base / "big").write_text("line of text\n" * 40_000)
    (base / "binary").write_bytes(bytes(range(256)) * 1000)
    much = "for i in $(seq 3000); do echo line $i of much output; done"
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        rewrite = (
            'for f in ????nnn*; do echo "$f $f $f" >"$f"; done; head -c 99999 /dev/urandom >big'
        )
        await agent.call("branch_run", branch="b", command=rewrite)
        calls: list[tuple[str, dict[str, Any]]] = [
            ("branch_run", {"branch": "b", "command": much}),
            ("branch_files", {"branch": "main"}),
            ("branch_diff", {"branch": "b"}),
            ("branch_diff", {"branch": "b", "patch": True}),
            ("branch_read", {"branch": "main", "path": "big", "limit": 262144}),
            ("branch_read", {"branch": "main", "path": "binary"}),
            ("branch_speculate", {"candidates": [f"{much}; exit 1"] * 32}),
            ("branch_commit", {"branch": "b"}),
            ("branch_undo", {"dry_run": True}),
        ]
        for tool, arguments in calls:
            for form in await answer_of(agent, tool, **arguments):
                assert len(form) < CHARACTERS_MAX, (tool, arguments, len(form))
        binary = {"branch": "main", "path": "binary", "limit": 262144}
        for form in await answer_of(agent, "branch_read", **binary):
            assert len(form) < BINARY_CHARACTERS_MAX


async def test_long_commands_and_many_branches_stay_within_it_too(
    real_workspace: Workspace,
) -> None:
    async with connected(served(real_workspace)) as agent:
        long = f"exit 1 # {'long ' * 5000}end"
        for number in range(102):
            await agent.call("branch_create", name=f"{number:03}{'n' * 60}")
        for tool, arguments in (
            ("branch_speculate", {"candidates": [long] * 64}),
            ("branch_best_of_n", {"candidates": [long] * 64}),
            ("branch_start", {"branch": f"000{'n' * 60}", "command": long}),
            ("branch_list", {}),
        ):
            for form in await answer_of(agent, tool, **arguments):
                assert len(form) < CHARACTERS_MAX, (tool, len(form))
        raced = await agent.call("branch_speculate", candidates=[long])
        assert raced["candidates"][0]["command"].startswith("exit 1 # long")
        assert raced["candidates"][0]["command"].endswith("long end")
        listed = await agent.call("branch_list")
        assert listed["left_out"] == 2
        assert listed["branches"][-1]["name"].startswith("101")


async def test_a_long_listing_can_be_continued(real_workspace: Workspace) -> None:
    names = {f"{number:04}{'n' * 60}" for number in range(700)} | {"seed.txt"}
    for name in names:
        (real_workspace.base / name).touch()
    found: list[str] = []
    async with connected(served(real_workspace)) as agent:
        while True:
            after = found[-1] if found else ""
            listed = await agent.call("branch_files", branch="main", after=after)
            found += [each["name"] for each in listed["entries"]]
            if not listed["truncated"]:
                break
    assert found == sorted(names)


async def test_a_patch_shows_text_and_leaves_binary_content_out(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        command = "head -c 5000 /dev/urandom >a.bin; echo hello >b.txt; head -c 99 /dev/zero >c"
        await agent.call("branch_run", branch="b", command=command)
        patch = (await agent.call("branch_diff", branch="b", patch=True))["patch"]
        assert patch.count("# binary content left out") == 2
        assert "+hello\n" in patch
        assert "literal 5000" not in patch
        assert "literal 5000" in await agent.text_of("branching://branches/b/diff")


async def test_a_branch_is_a_directory_that_other_tools_can_use(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        made = await agent.call("branch_create", name="b")
        with open(f"{made['path']}/by-path", "w") as file:  # noqa: PTH123
            file.write("x")
        read = await agent.call("branch_read", branch="b", path="by-path")
        assert read["content"] == "x"


async def test_the_text_of_an_answer_is_plain(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="d/f", content="x")
        text, _ = await answer_of(agent, "branch_run", branch="b", command="echo hi; exit 3")
        head, output = text.split("\n")
        assert head.startswith("exit code 3 after ")
        assert output == "hi"
        text, _ = await answer_of(agent, "branch_diff", branch="b")
        assert text == "branch b: 2 added\nA d/\nA d/f"
        text, _ = await answer_of(agent, "branch_files", branch="b")
        assert text == "d/\nseed.txt 5"
        text, _ = await answer_of(agent, "branch_read", branch="b", path="d/f")
        assert text == "x"
        for tool in ("branch_list", "branch_history"):
            assert (await answer_of(agent, tool))[0]


def test_the_limits_of_changes_leave_room_for_their_form() -> None:
    assert CHANGES_MAX * 80 + CHANGES_BYTES_MAX < CHARACTERS_MAX


def test_descriptions_have_no_indentation_of_the_source() -> None:
    for tool in make_tools():
        assert "\n  " not in tool.description
        for name, schema in tool.parameters["properties"].items():
            assert schema.get("description"), (tool.name, name)


@pytest.mark.parametrize("size", [1, 1000, 70_000])
def test_long_lines_are_passed_on_in_pieces_and_lose_nothing(size: int) -> None:
    text = "é" * 200_000 + "\n\nlast\n"
    data = text.encode()
    told: list[str] = []
    lines = LineSplitter(told.append)
    for start in range(0, len(data), size):
        lines.feed(data[start : start + size])
    lines.finish()
    assert told[-2:] == ["", "last"]
    assert "".join(told[:-2]) == "é" * 200_000
    assert all(piece for piece in told[:-2])


async def test_disjoint_work_of_two_agents_is_committed(real_workspace: Workspace) -> None:
    base = real_workspace.base
    async with (
        connected(served(real_workspace)) as one,
        connected(served(real_workspace)) as other,
    ):
        await one.call("branch_create", name="one")
        await other.call("branch_create", name="other")
        await one.call("branch_write", branch="one", path="a", content="1")
        await other.call("branch_write", branch="other", path="b", content="2")
        await one.call("branch_commit", branch="one")
        await other.call("branch_write", branch="other", path="c", content="3")
        await other.call("branch_commit", branch="other")
    assert [(base / name).read_text() for name in "abc"] == ["1", "2", "3"]


async def test_a_stale_branch_is_rebased_by_its_commit(real_workspace: Workspace) -> None:
    base = real_workspace.base
    async with connected(served(real_workspace)) as agent:
        for name in ("b", "c", "d"):
            await agent.call("branch_create", name=name)
            await agent.call("branch_write", branch=name, path=name, content=name)
        await agent.call("branch_write", branch="d", path="seed.txt", content="d")
        with real_workspace.branch("first") as first:
            (first.path / "seed.txt").write_text("first")
        text = await agent.refused("branch_write", branch="b", path="more", content="")
        assert "branch_rebase" in text
        assert "branch_abort" not in text
        diff = await agent.call("branch_diff", branch="b", patch=True)
        assert [each["path"] for each in diff["changes"]] == ["b"]
        committed = await agent.call("branch_commit", branch="b")
        assert committed["action"] == "committed"
        assert (await agent.call("branch_rebase", branch="c"))["state"] == "live"
        read = await agent.call("branch_read", branch="c", path="seed.txt")
        assert read["content"] == "first"
        assert "seed.txt" in await agent.refused("branch_commit", branch="d")
        assert "seed.txt" in await agent.refused("branch_rebase", branch="d")
        assert (base / "seed.txt").read_text() == "first"
        await agent.call("branch_commit", branch="d", force=True)
    assert [(base / name).read_text() for name in ("b", "d", "seed.txt")] == ["b", "d", "d"]


async def test_undo_refuses_a_commit_that_is_not_the_last(real_workspace: Workspace) -> None:
    base = real_workspace.base
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="mine", content="x")
        commit = (await agent.call("branch_commit", branch="b"))["commit"]
        assert commit == (await agent.call("branch_history"))["commits"][-1]["id"]
        with real_workspace.branch("person") as person:
            (person.path / "theirs").write_text("x")
        text = await agent.refused("branch_undo", commit=commit)
        assert "'person'" in text
        assert (base / "theirs").exists()
        await agent.call(
            "branch_undo", commit=(await agent.call("branch_history"))["commits"][-1]["id"]
        )
        assert not (base / "theirs").exists()
        await agent.call("branch_undo", commit=commit)
        assert not (base / "mine").exists()


async def test_an_abort_lists_what_it_dropped(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="f", content="x")
        dropped = await agent.call("branch_abort", branch="b")
        assert (dropped["summary"], dropped["changes"][0]["path"]) == ("1 added", "f")


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("branch_run", {"command": "true", "timeout_seconds": 9.0}, "at most 5"),
        ("branch_write", {"path": ".branching/x", "content": ""}, "store of the branches"),
        ("branch_read", {"path": "../x"}, "leads out of the workspace"),
        ("branch_write", {"path": "../x", "content": ""}, "not the name of a file"),
        ("branch_read", {"path": "seed.txt/x"}, "Not a directory"),
        ("branch_files", {"path": "seed.txt"}, "Not a directory"),
        ("branch_read", {"path": "pipe"}, "not an ordinary file"),
        ("branch_read", {"path": "n" * 300}, "File name too long"),
        ("branch_read", {"path": "a\0b"}, "not a path"),
        ("branch_write", {"path": "f", "content": "!", "is_base64": True}, "base64"),
        ("branch_run", {"command": "true\0"}, "NUL"),
        ("branch_speculate", {"candidates": ["true"], "setup": "a\0"}, "NUL"),
        ("branch_best_of_n", {"candidates": ["true", "true"], "n": 2}, "single command"),
        ("branch_create", {"name": "a/b"}, "cannot be the name"),
        ("branch_commit", {"force": True, "skip": True}, "give one"),
        ("branch_commit", {"only": ["none"]}, "matches 'none'"),
        ("branch_commit", {"only": ["[z"]}, "not a pattern"),
        ("branch_undo", {}, "was undone"),
        ("branch_redo", {}, "was redone"),
        ("branch_committ", {}, "no tool"),
        ("session_end", {}, "no session"),
        *[
            (tool, {"branch": "gone"}, "no branch 'gone'")
            for tool in ("branch_diff", "branch_keep")
        ],
        *[
            (tool, {"branch": "main"}, "workspace itself")
            for tool in ("branch_diff", "branch_abort")
        ],
    ],
)
async def test_refusals_say_what_is_wrong(
    real_workspace: Workspace, tool: str, arguments: dict[str, Any], words: str
) -> None:
    async with connected(served(real_workspace, seconds_max=5.0)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command="mkfifo pipe")
        of_branch = {"branch": "b"} if "branch" in registered(tool) else {}
        text = await agent.refused(tool, **{**of_branch, **arguments})
        said, found, advice = text.partition("\nNext: ")
        assert words in said
        assert found, text
        assert advice.strip() not in ("", "tell the user")


async def test_a_prompt_that_is_refused_says_what_to_give(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        for name, arguments, words in (
            ("try_three_way", {}, "similar: try_three_ways"),
            ("try_three_ways", {"task": "x"}, "the argument 'check' is missing"),
            ("try_three_ways", {"task": "x", "check": "y", "n": "1"}, "no argument 'n'"),
        ):
            with pytest.raises(MCPError, match=r"Nothing was done\.\nNext: ") as caught:
                await agent.client.get_prompt(name, arguments)
            assert words in str(caught.value)


def registered(tool: str) -> dict[str, Any]:
    """Returns the parameters of a tool; none if it does not exist."""
    found = [each for each in make_tools() if each.name == tool]
    return found[0].parameters["properties"] if found else {}
