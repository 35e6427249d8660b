"""The tools, driven by the protocol's own client against a server in this process."""

from __future__ import annotations

import base64
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from mcp import MCPError
from support.tools import SECONDS_MAX, connected, served

from branching import BranchError, ResourceLimits, Workspace
from branching.runlog.control_socket import send_request
from branching.runlog.run_log import read_entries

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["auto", "legacy"])
def mode(request: pytest.FixtureRequest) -> str:
    """Both generations of the protocol: with a handshake, and without."""
    return str(request.param)


READS = {"branch_list", "branch_read", "branch_files", "branch_diff"}
READS |= {"branch_output", "branch_history"}
RACES = {"branch_speculate", "branch_best_of_n"}
COMMITS = {"branch_commit", "branch_undo", "branch_redo"}
DESTROYS = {"branch_abort", "session_pick", "session_end", *RACES, *COMMITS}
RUNS = {"branch_run", "branch_start", "session_run"}
ADDS = {"branch_create", "branch_rebase", "branch_write", "branch_edit", "branch_keep"}
ADDS |= {"branch_stop", "session_fork", *RUNS}


async def test_the_tools_say_what_they_do(real_workspace: Workspace, mode: str) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
    assert set(tools) == READS | DESTROYS | ADDS
    for name, tool in tools.items():
        assert tool.title
        assert tool.description
        assert tool.output_schema is not None
        hints = tool.annotations
        assert hints is not None
        assert hints.read_only_hint is (name in READS)
        if name not in READS:
            assert hints.destructive_hint is (name in DESTROYS)
        assert bool(hints.open_world_hint) is (name in RUNS | RACES)
        assert name.startswith(("branch_", "session_"))
        for parameter, schema in tool.input_schema["properties"].items():
            assert "description" in schema, (name, parameter)


async def test_a_change_is_made_looked_at_committed_and_undone(
    real_workspace: Workspace, mode: str
) -> None:
    base = real_workspace.base
    async with connected(served(real_workspace), mode=mode) as agent:
        made = await agent.call("branch_create", name="fix")
        assert (made["place"], made["kept"]) == ("/main/fix", False)
        written = await agent.call("branch_write", branch="fix", path="a/b.txt", content="été\n")
        assert written == {"branch": "fix", "path": "a/b.txt", "created": True, "size": 6}
        script = "#!/bin/sh\ncat a/b.txt; pwd; echo done >&2\n"
        await agent.call("branch_write", branch="fix", path="go", content=script, executable=True)
        ran = await agent.call("branch_run", branch="fix", command="./go && rm seed.txt")
        assert ran["output"] == f"été\n{real_workspace.seen_at}\ndone"
        assert (ran["exit_code"], ran["success"], ran["ended"]) == (0, True, "exit")
        read = await agent.call("branch_read", branch="main", path="seed.txt")
        assert read["content"] == "seed\n"  # the workspace is as it was
        assert not (base / "a").exists()
        diff = await agent.call("branch_diff", branch="fix", patch=True)
        assert {each["path"]: each["change"] for each in diff["changes"]} == {
            "a": "added",
            "a/b.txt": "added",
            "go": "added",
            "seed.txt": "deleted",
        }
        assert "+été" in diff["patch"]
        assert await agent.text_of("branching://branches/fix/diff") == diff["patch"]
        tried = await agent.call("branch_commit", branch="fix", dry_run=True)
        assert (tried["action"], len(tried["changes"])) == ("none", 4)
        done = await agent.call("branch_commit", branch="fix")
        assert (done["action"], done["summary"]) == ("committed", diff["summary"])
        assert (base / "a/b.txt").read_text() == "été\n"
        assert os.access(base / "go", os.X_OK)
        assert not (base / "seed.txt").exists()
        (commit,) = (await agent.call("branch_history"))["commits"]
        assert (commit["branch"], commit["undone"]) == ("fix", False)
        assert not (await agent.call("branch_undo", dry_run=True))["done"]
        assert (base / "go").exists()
        assert (await agent.call("branch_undo"))["done"]
        assert sorted(path.name for path in base.iterdir()) == [".branching", "seed.txt"]
        assert (await agent.call("branch_redo"))["commit"]["branch"] == "fix"
        assert (base / "go").exists()


async def test_a_race_of_three_commands(real_workspace: Workspace, mode: str) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        candidates = [
            "touch answer; exec sleep 600",
            "echo right >answer; echo I am it",
            "trap '' TERM; sleep 600",
        ]
        raced = await agent.call(
            "branch_speculate",
            candidates=candidates,
            setup="touch go prepared",
            only=["answer"],
            commit=True,
        )
        winner = raced["candidates"][1]
        assert await agent.text_of(winner["log"]) == "I am it\n"
        await agent.hears("[")
        # What was not chosen is open until the session ends.
        rest = await agent.call("branch_diff", branch=raced["branch"])
        assert [each["path"] for each in rest["changes"]] == ["go", "prepared"]
    assert (raced["committed"], raced["winner"], raced["remaining"]) == (True, 1, 2)
    assert [each["state"] for each in raced["candidates"]] == ["cancelled", "won", "cancelled"]
    assert [each["command"] for each in raced["candidates"]] == candidates
    assert (winner["output"], winner["reason"], winner["exit_code"]) == ("I am it", "exit 0", 0)
    assert [each["path"] for each in raced["changes"]] == ["answer"]
    assert (real_workspace.base / "answer").read_text() == "right\n"
    assert not (real_workspace.base / "prepared").exists()


async def test_commits_warn_of_files_that_give_rights(real_workspace: Workspace) -> None:
    make = "for n in $(seq 12); do : >$n; chmod 4755 $n; done; : >plain"
    warning = "with set-user-ID: users who execute it get rights of its owner or group"
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_run", branch="b", command=make)
        for dry_run in (True, False):
            answer = await agent.client.call_tool(
                "branch_commit", {"branch": "b", "dry_run": dry_run}
            )
            assert answer.structured_content is not None
            warnings = answer.structured_content["warnings"]
            assert len(warnings) == 11
            assert warning in warnings[0]
            assert warnings[-1] == "warning: 2 more files with such rights"
            assert all(each in str(answer.content) for each in (warning, warnings[-1]))
        raced = await agent.call(
            "branch_speculate", candidates=["touch other; chmod 2755 other"], commit=True
        )
        (only,) = raced["warnings"]
        assert "'other' with set-group-ID" in only


async def test_the_best_of_several_is_committed(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        raced = await agent.call(
            "branch_best_of_n",
            candidates=["echo $BRANCHING_ATTEMPT >tried; echo 0.$BRANCHING_ATTEMPT >&3"],
            n=3,
            commit=True,
        )
        assert raced["winner"] == 2
        assert [each["score"] for each in raced["candidates"]] == [0.0, 0.1, 0.2]
        assert (real_workspace.base / "tried").read_text() == "2\n"
        raced = await agent.call(
            "branch_best_of_n",
            candidates=["echo bbb >tried", "echo a >tried", "echo cc >tried; false"],
            evaluate="echo score; wc -c <tried",
        )
        assert (raced["committed"], raced["winner"]) == (False, 0)
        assert (real_workspace.base / "tried").read_text() == "2\n"
        looked = await agent.call("branch_read", branch=raced["branch"], path="tried")
        assert looked["content"] == "bbb\n"
        await agent.call("branch_commit", branch=raced["branch"])
        assert (real_workspace.base / "tried").read_text() == "bbb\n"


async def test_nothing_that_succeeds_changes_nothing(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        raced = await agent.call(
            "branch_speculate", candidates=["touch x; echo no; false", "exit 9"]
        )
        assert (raced["committed"], raced["winner"], raced["timed_out"]) == (False, None, False)
        said = [(each["state"], each["reason"], each["output"]) for each in raced["candidates"]]
        assert said == [("failed", "exit 1", "no"), ("failed", "exit 9", "")]
        raced = await agent.call("branch_speculate", candidates=["sleep 600"], timeout_seconds=0.5)
        assert (raced["winner"], raced["timed_out"]) == (None, True)
        assert raced["candidates"][0]["state"] == "timed_out"
        assert (await agent.call("branch_list"))["branches"] == []
    assert not (real_workspace.base / "x").exists()


async def test_a_race_in_a_branch_is_committed_into_it(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="outer")
        raced = await agent.call(
            "branch_speculate", candidates=["touch x"], parent="outer", commit=True
        )
        assert raced["committed"]
        await agent.call("branch_create", name="inner", parent="outer")
        listed = (await agent.call("branch_list"))["branches"]
        assert [(each["place"], each["frozen"]) for each in listed] == [
            ("/main/outer", True),
            ("/main/outer/inner", False),
        ]
        said = await agent.refused("branch_write", branch="outer", path="y", content="")
        assert "frozen while its children are open" in said
        assert not (real_workspace.base / "x").exists()
        await agent.call("branch_abort", branch="inner")
        await agent.call("branch_commit", branch="outer")
        assert (real_workspace.base / "x").exists()


@pytest.mark.parametrize(
    ("tool", "arguments", "says"),
    [
        ("branch_run", {"branch": "no", "command": "true"}, "Next: branch_list"),
        ("branch_diff", {"branch": "no"}, "Next: branch_list"),
        ("branch_commit", {"branch": "main"}, "changes by commits alone"),
        ("branch_write", {"branch": "main", "path": "x", "content": ""}, "Next: branch_create"),
        ("branch_create", {"name": "a/b"}, "cannot be the name of a branch"),
        ("branch_create", {"name": "b"}, "Next: "),
        ("branch_create", {"name": "c", "parent": "no"}, "Next: branch_list"),
        ("branch_read", {"branch": "b", "path": "no"}, "Next: branch_files"),
        ("branch_read", {"branch": "b", "path": "."}, "Next: branch_files"),
        ("branch_read", {"branch": "b", "path": "seed.txt", "offset": 1 << 63}, "offset"),
        ("branch_read", {"branch": "b", "path": "../base/seed.txt"}, "stay in it"),
        ("branch_read", {"branch": "b", "path": "/etc/passwd"}, "stay in it"),
        ("branch_read", {"branch": "b", "path": "out/passwd"}, "links are not followed"),
        ("branch_write", {"branch": "b", "path": "out/x", "content": ""}, "links are not"),
        ("branch_files", {"branch": "b", "path": "out"}, "links are not followed"),
        ("branch_read", {"branch": "b", "path": "sub/key.pem"}, "hidden by the rules"),
        ("branch_read", {"branch": "b", "path": "./sub//key.pem"}, "hidden by the rules"),
        ("branch_write", {"branch": "b", "path": "sub/key.pem", "content": ""}, "hidden"),
        ("branch_write", {"branch": "b", "path": "x", "content": "?", "is_base64": True}, "base64"),
        ("branch_undo", {}, "Next: branch_history lists"),
        ("branch_best_of_n", {"candidates": ["a", "b"], "n": 2}, "n is for a single command"),
        ("branch_speculate", {"candidates": []}, "at least 1 item"),
        ("branch_run", {"branch": "b", "command": ""}, "at least 1 character"),
    ],
)
async def test_a_failure_says_what_to_do_next(
    real_workspace: Workspace, tool: str, arguments: dict[str, Any], says: str
) -> None:
    base = real_workspace.base
    (base / "sub").mkdir()
    (base / "sub" / "key.pem").write_text("secret")
    (base / "out").symlink_to("/etc")
    async with connected(served(real_workspace, hide=("**/*.pem",))) as agent:
        await agent.call("branch_create", name="b")
        assert says in await agent.refused(tool, **arguments)
        diff = await agent.call("branch_diff", branch="b")
        assert diff["changes"] == []
    assert (base / "sub" / "key.pem").read_text() == "secret"


async def test_files_are_read_in_parts_and_as_what_they_are(real_workspace: Workspace) -> None:
    data = bytes(range(256))
    (real_workspace.base / "bytes").write_bytes(data)
    (real_workspace.base / "text").write_text("aé" * 10)
    async with connected(served(real_workspace)) as agent:
        read = await agent.call("branch_read", branch="main", path="bytes", limit=200)
        assert (read["encoding"], read["next_offset"], read["size"]) == ("base64", 200, 256)
        assert base64.b64decode(read["content"]) == data[:200]
        text, offset = "", 0
        while offset is not None:  # never half a character
            part = await agent.call(
                "branch_read", branch="main", path="text", offset=offset, limit=5
            )
            assert part["encoding"] == "utf-8"
            text, offset = text + part["content"], part["next_offset"]
        assert text == "aé" * 10
        await agent.call("branch_create", name="b")
        content = base64.b64encode(data).decode()
        await agent.call("branch_write", branch="b", path="new", content=content, is_base64=True)
        assert await agent.call("branch_read", branch="b", path="new") == {
            **await agent.call("branch_read", branch="b", path="bytes"),
            "path": "new",
        }
        listed = await agent.call("branch_files", branch="b")
        assert [(each["name"], each["kind"]) for each in listed["entries"]] == [
            ("bytes", "file"),
            ("new", "file"),
            ("seed.txt", "file"),
            ("text", "file"),
        ]


async def test_output_is_bounded_and_the_log_has_it_all(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        ran = await agent.call("branch_run", branch="b", command="seq 100000")
        assert ran["truncated"]
        assert len(ran["output"]) < 40_000
        lines = ran["output"].splitlines()
        assert (lines[0], lines[-1]) == ("1", "100000")
        whole = await agent.text_of(ran["log"])
        assert whole == "".join(f"{number}\n" for number in range(1, 100_001))
        (gap,) = [line for line in lines if line.startswith("[")]
        head, tail = ran["output"].split(f"\n{gap}\n")
        assert gap == f"[{len(whole) - 1 - len(head) - len(tail)} characters left out]"
        assert whole.startswith(head)
        assert whole.endswith(f"{tail}\n")
        with pytest.raises(MCPError, match="no output is kept"):
            await agent.text_of("branching://logs/nobody")
        with pytest.raises(MCPError, match="branching://logs"):
            await agent.text_of("branching://logs/..%2F..%2Fetc")
        with pytest.raises(MCPError, match="branch_list"):
            await agent.text_of("branching://branches/no/diff")


@pytest.mark.parametrize(
    ("rules", "command", "ended"),
    [
        ({"seconds_max": 0.5}, "sleep 600", "timeout"),
        ({"limits": ResourceLimits(disk=1 << 20)}, "head -c 9000000 /dev/zero >big", "disk"),
        ({"limits": ResourceLimits(pids=8)}, "for i in $(seq 40); do sleep 9 & done", "pids"),
        ({}, "kill -9 $$", "signal"),
    ],
)
async def test_limits_hold_and_are_reported(
    real_workspace: Workspace, rules: dict[str, Any], command: str, ended: str
) -> None:
    async with connected(served(real_workspace, **rules)) as agent:
        await agent.call("branch_create", name="b")
        ran = await agent.call("branch_run", branch="b", command=command)
        assert (ran["success"], ran["ended"]) == (False, ended)


async def test_hidden_files_keys_and_the_network_are_kept_from_commands(
    real_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    (real_workspace.base / ".env").write_text("KEY=1\n")
    monkeypatch.setenv("OTHER_API_KEY", "lent")
    rules: dict[str, Any] = {"hide": (".env",), "env": ("OTHER_API_KEY", "NO_SUCH_NAME")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        knock = f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}'"
        opened = served(real_workspace, network=True, clean_env=False)
        async with connected(opened) as agent:
            script = f"{knock} && cat .env && echo $SOME_API_KEY"
            raced = await agent.call("branch_speculate", candidates=[script])
            assert raced["candidates"][0]["output"] == "KEY=1\nsecret"
        async with connected(served(real_workspace, **rules)) as agent:
            await agent.call("branch_create", name="b")
            ran = await agent.call("branch_run", branch="b", command="cat .env; env")
            assert "secret" not in ran["output"]
            assert "OTHER_API_KEY=lent" in ran["output"].splitlines()
            assert any(line.startswith("PATH=") for line in ran["output"].splitlines())
            assert "KEY=1" not in ran["output"]
            candidates = ["cat .env", 'test -n "$SOME_API_KEY"', knock]
            raced = await agent.call("branch_speculate", candidates=candidates)
            assert raced["winner"] is None


@pytest.mark.parametrize(
    "path",
    [
        "secrets/key",
        "copy.txt",
        "sub/../secrets/key",
        "./secrets//key",
        "sub/link",
        "linked/key",
        "named.txt",
        "secrets/new",
    ],
)
async def test_a_hidden_file_is_hidden_under_every_name(
    real_workspace: Workspace, path: str
) -> None:
    """The names are `..`, symbolic links, hard links, and the target of a hidden link:
    neither the file tools nor commands read it, and nothing is written there."""
    base = real_workspace.base
    (base / "secrets").mkdir()
    (base / "sub").mkdir()
    (base / "secrets" / "key").write_text("SECRET\n")
    (base / "copy.txt").hardlink_to(base / "secrets" / "key")
    (base / "sub" / "link").symlink_to("../secrets/key")
    (base / "linked").symlink_to("secrets")
    (base / "named.txt").write_text("SECRET\n")
    (base / "own.key").symlink_to("named.txt")
    async with connected(served(real_workspace, hide=("secrets", "*.key"))) as agent:
        await agent.call("branch_create", name="b")
        for branch in ("b", "main"):
            assert "SECRET" not in await agent.refused("branch_read", branch=branch, path=path)
        await agent.refused("branch_write", branch="b", path=path, content="x")
        ran = await agent.call("branch_run", branch="b", command=f"cat {path}; echo x >{path}")
        assert "SECRET" not in ran["output"]
        assert (await agent.call("branch_diff", branch="b"))["changes"] == []
        assert (await agent.call("branch_read", branch="b", path="seed.txt"))["content"]


async def test_external_changes_are_not_overwritten_without_force(
    real_workspace: Workspace,
) -> None:
    seed = real_workspace.base / "seed.txt"
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        await agent.call("branch_write", branch="b", path="seed.txt", content="ours\n")
        seed.write_text("theirs\n")
        said = await agent.refused("branch_commit", branch="b")
        assert "seed.txt" in said
        assert "force=true" in said
        assert seed.read_text() == "theirs\n"
        await agent.call("branch_commit", branch="b", force=True)
        assert seed.read_text() == "ours\n"


async def test_a_stale_branch_is_shown_as_stale(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        with real_workspace.branch("first") as first:
            (first.path / "new").write_text("x")
        assert (await agent.call("branch_list"))["branches"][0]["state"] == "stale"
        said = await agent.refused("branch_read", branch="b", path="seed.txt")
        assert "committed first" in said
        assert "Next: branch_rebase" in said or "committed first: branch_rebase" in said


async def test_branches_end_with_the_server_unless_they_are_kept(real_workspace: Workspace) -> None:
    with real_workspace.branch("others", on_success=None):
        pass
    async with connected(served(real_workspace)) as agent:
        for name, parent in (("a", "main"), ("b", "a"), ("c", "main")):
            await agent.call("branch_create", name=name, parent=parent)
        kept = await agent.call("branch_keep", branch="c")
        assert kept["action"] == "kept"
        await agent.call("branch_run", branch="others", command="touch x")
        await agent.call("branch_speculate", candidates=["touch y"], commit=False)
        listed = (await agent.call("branch_list"))["branches"]
        assert {each["name"]: each["kept"] for each in listed[:4]} == {
            "others": True,
            "a": False,
            "b": False,
            "c": True,
        }
        assert len(listed) == 5
    assert [record.name for record in real_workspace.branches()] == ["others", "c"]
    for name in ("others", "c"):
        real_workspace.reopen(name).abort()


async def test_a_call_that_is_cancelled_ends_its_command(
    real_workspace: Workspace, tmp_path: Path, mode: str
) -> None:
    async with connected(served(real_workspace), mode=mode) as agent:
        await agent.call("branch_create", name="b")
        async with anyio.create_task_group() as group:
            command = "touch begun; exec sleep 600"
            group.start_soon(lambda: agent.refused("branch_run", branch="b", command=command))
            while not (real_workspace.root / "@b" / "begun").exists():
                await anyio.sleep(0.05)
            said = await agent.refused("branch_commit", branch="b")
            assert "something still runs" in said
            group.cancel_scope.cancel()
        # The server goes on, and the branch can be committed as soon as the command is gone.
        with anyio.fail_after(SECONDS_MAX):
            while "something still runs" in str(
                (await agent.client.call_tool("branch_commit", {"branch": "b"})).content
            ):
                await anyio.sleep(0.05)
    assert (real_workspace.base / "begun").exists()


async def test_a_candidate_goes_with_its_race_and_not_before(real_workspace: Workspace) -> None:
    """A branch that a person keeps with `branching watch` stays."""
    async with connected(served(real_workspace)) as agent:
        async with anyio.create_task_group() as group:
            race = partial(agent.call, "speculate", candidates=["sleep 600", "sleep 601"])
            group.start_soon(race)
            listed: list[dict[str, Any]] = []
            while [each["kept"] for each in listed] != [False, False]:
                await anyio.sleep(0.05)
                listed = (await agent.call("branch_list"))["branches"]
            names = [each["name"] for each in listed]
            logs = real_workspace.base / ".branching" / "logs"
            door = logs / read_entries(logs)[0].door
            said = await agent.refused("branch_keep", branch=names[0])
            assert "commit=false" in said
            await anyio.to_thread.run_sync(send_request, door, "keep", names[0])
            for name in names:
                await stopped(door, name)
        (kept,) = (await agent.call("branch_list"))["branches"]
        assert (kept["name"], kept["kept"]) == (names[0], True)
    real_workspace.reopen(names[0]).abort()


async def stopped(door: Path, name: str) -> None:
    """Stops a candidate, as soon as it runs."""
    with anyio.fail_after(SECONDS_MAX):
        while True:
            try:
                return await anyio.to_thread.run_sync(send_request, door, "stop", name)
            except BranchError:
                await anyio.sleep(0.05)


async def test_a_race_that_is_cancelled_leaves_no_branch(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        async with anyio.create_task_group() as group:
            candidates = ["sleep 600", "exec sleep 601"]
            group.start_soon(lambda: agent.refused("branch_speculate", candidates=candidates))
            while len((await agent.call("branch_list"))["branches"]) < 2:
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()
        with anyio.fail_after(SECONDS_MAX):
            while (await agent.call("branch_list"))["branches"]:
                await anyio.sleep(0.05)


async def test_abort_ends_the_processes_in_the_branch(real_workspace: Workspace) -> None:
    async with connected(served(real_workspace)) as agent:
        await agent.call("branch_create", name="b")
        ended: list[dict[str, Any]] = []

        async def run() -> None:
            command = "touch begun; sleep 600"
            ended.append(await agent.call("branch_run", branch="b", command=command))

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            while not (real_workspace.root / "@b" / "begun").exists():
                await anyio.sleep(0.05)
            assert (await agent.call("branch_abort", branch="b"))["action"] == "aborted"
        assert [each["ended"] for each in ended] == ["cancelled"]
        assert (await agent.call("branch_list"))["branches"] == []


@pytest.mark.parametrize(
    ("roots", "allowed"),
    [(None, True), ([], True), (["."], True), ([".."], True), (["sub"], False), (["/etc"], False)],
)
async def test_roots_are_honoured(
    real_workspace: Workspace, mode: str, roots: list[str] | None, allowed: bool
) -> None:
    (real_workspace.base / "sub").mkdir()
    given = None if roots is None else [(real_workspace.base / each).resolve() for each in roots]
    async with connected(served(real_workspace), mode=mode, roots=given) as agent:
        if allowed:
            await agent.call("branch_create", name="b")
            assert await agent.text_of("branching://branches/b/diff") == ""
            return
        for tool, arguments in (
            ("branch_create", {"name": "b"}),
            ("branch_read", {"branch": "main", "path": "seed.txt"}),
            ("branch_speculate", {"candidates": ["touch x"]}),
            ("branch_undo", {}),
        ):
            said = await agent.refused(tool, **arguments)
            assert "in none of the client's roots" in said
            assert "Next: tell the user" in said
        with pytest.raises(MCPError, match="in none of the client's roots"):
            await agent.text_of("branching://branches/b/diff")
    assert real_workspace.branches() == []


async def test_a_directory_of_the_host_counts_as_the_workspace(real_workspace: Workspace) -> None:
    host = Path("/home/somebody/project")
    for root, allowed in ((host.parent, True), (Path("/home/other"), False)):
        async with connected(served(real_workspace, seen_as=(host,)), roots=[root]) as agent:
            answer = await agent.client.call_tool("branch_list", {})
            assert answer.is_error is not allowed
