"""`branching create` and `close`, and the hooks that call them: branches for other programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.branchfs import find_program, mounted
from support.command import Done, Running, branching

from branching import MountError, Workspace
from branching._linux.mountinfo import read_mounts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFS", find_program())
    monkeypatch.delenv("CLAUDE_PROJECT_DIR", raising=False)


@pytest.fixture
def base(place: Path) -> Iterator[Path]:
    path = place / "project"
    (path / "node_modules").mkdir(parents=True)
    (path / ".gitignore").write_text("node_modules\n")
    (path / "node_modules" / "module").write_text("ignored by git\n")
    yield path
    if mounts_of(path):
        branching(path, "close")


def mounts_of(base: Path) -> list[Path]:
    return [mount.directory for mount in read_mounts() if mount.source == str(base)]


def created(base: Path, *words: str) -> Path:
    done = branching(base, "create", *words)
    assert done.code == 0, done
    assert re.fullmatch("✓ branch .* is mounted · unmount: branching close\n", done.err)
    return Path(done.out.rstrip("\n"))


def hook(base: Path, action: str, payload: object, **environment: str) -> Done:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return branching(base.parent, "hook", "worktree", action, stdin=text, **environment)


def names(base: Path) -> list[str]:
    return [each["name"] for each in branching(base, "ls", "--json").document["branches"]]


class TestCreate:
    def test_the_directory_stays_until_close(self, base: Path) -> None:
        path = created(base, "idea")
        assert (path / "node_modules" / "module").read_text() == "ignored by git\n"
        (path / "made").write_text("by another program\n")
        assert branching(base, "run", "--", "touch", "other").code == 0
        assert (path / "made").exists()
        assert not (base / "made").exists()
        assert names(base) == ["idea"]
        done = branching(base, "close")
        assert (done.code, done.out) == (0, "")
        assert done.err == f"✓ unmounted {base}; its open branches are kept\n"
        assert mounts_of(base) == []
        assert not path.parent.exists()
        assert names(base) == ["idea"]
        assert branching(base, "commit", "--rebase", "idea").code == 0
        assert (base / "made").read_text() == "by another program\n"

    def test_json(self, base: Path) -> None:
        document = branching(base, "create", "--json", "idea").document
        assert Path(document["path"]).is_dir()
        assert document["action"] == "kept"
        closed = branching(base, "close", "--json").document
        assert closed == {
            "version": 1,
            "command": "close",
            "base": str(base),
            "mounted": False,
        }

    def test_an_open_branch_is_taken_only_if_allowed(self, base: Path) -> None:
        path = created(base, "idea")
        assert branching(base, "close").code == 0
        refused = branching(base, "create", "idea")
        assert refused.code == 125
        assert "is open already" in refused.err
        assert mounts_of(base) == []
        again = created(base, "--exist-ok", "idea")
        assert again.is_dir()
        assert again.name == path.name

    def test_close_names_a_mount_that_is_busy(self, base: Path) -> None:
        path = created(base, "idea")
        with subprocess.Popen(["sleep", "600"], cwd=path) as editor:
            done = branching(base, "close")
            editor.kill()
        assert done.code == 125
        assert "branch idea is in use" in done.err
        assert branching(base, "ls").code == 0  # the next command unmounts it
        assert mounts_of(base) == []

    def test_close_leaves_the_mount_to_another_user_of_it(self, base: Path) -> None:
        path = created(base, "idea")
        script = "echo up >&2; until test -e stop; do sleep 0.05; done"
        run = Running(base, ["run", "-b", "other", "--", "sh", "-c", script])
        run.wait_for_line("up")
        done = branching(base, "close")
        assert done.code == 0
        assert "unmounted when the last" in done.err
        assert path.is_dir()
        (path.parent / "@other" / "stop").touch()
        assert run.done().code == 0
        assert mounts_of(base) == []

    def test_a_mount_made_by_hand_is_left_alone(self, base: Path, place: Path) -> None:
        point = place / "mount"
        with mounted(base, point):
            path = created(base, "idea")
            assert path.is_relative_to(point)
            done = branching(base, "close")
            assert done.code == 125
            assert f"branchfs unmount {point}" in done.err
            assert path.is_dir()
            assert branching(base, "abort", "idea").code == 0

    def test_a_file_that_names_an_earlier_mount_is_void(self, base: Path) -> None:
        created(base, "idea")
        mark = base / ".branching" / "agents" / "mount"
        text = mark.read_text()
        assert branching(base, "close").code == 0
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(text)
        assert branching(base, "run", "--", "true").code == 0
        assert mounts_of(base) == []

    def test_a_link_in_the_place_of_that_file_is_refused(self, base: Path, place: Path) -> None:
        outside = place / "outside"
        outside.write_text("untouched")
        created(base, "first")
        assert branching(base, "close").code == 0
        agents = base / ".branching" / "agents"
        agents.mkdir(exist_ok=True)
        (agents / "mount").symlink_to(outside)
        done = branching(base, "create", "idea")
        assert done.code == 125
        assert str(agents / "mount") in done.err
        assert outside.read_text() == "untouched"
        assert names(base) == ["first"]

    def test_a_container_has_no_path_for_the_host(self, base: Path) -> None:
        outside = {
            "BRANCHING_COMMAND_NAME": "branching-docker",
            "BRANCHING_HOST_WORKSPACE": "/home/me/x",
        }
        for words in (["create", "idea"], ["close"], ["hook", "worktree", "create"]):
            done = branching(base, *words, **outside)
            assert done.code == 2, done
            assert "on the host" in done.err
        assert mounts_of(base) == []


def test_the_library_keeps_a_mount(base: Path, place: Path) -> None:
    with Workspace.open(base) as space:
        point = space.root
        space.keep_mounted()
    assert mounts_of(base) == [point]
    with Workspace.open(base) as space:
        assert space.root == point
        space.keep_mounted(False)
    assert mounts_of(base) == []
    by_hand = place / "mount"
    with mounted(base, by_hand), Workspace(by_hand) as space, pytest.raises(MountError):
        space.keep_mounted()


class TestHook:
    def payload(self, base: Path, **fields: str) -> dict[str, str]:
        return {
            "session_id": "412cbaa3",
            "transcript_path": "/home/me/.claude/projects/x.jsonl",
            "cwd": str(base),
            **fields,
        }

    def test_a_worktree_is_a_branch(self, base: Path) -> None:
        payload = self.payload(base, hook_event_name="WorktreeCreate", name="fix")
        done = hook(base, "create", payload)
        assert (done.code, done.err) == (0, "")
        path = Path(done.out.rstrip("\n"))
        assert (path / "node_modules" / "module").is_file()
        assert names(base) == ["worktree-fix"]
        assert hook(base, "create", payload).out == done.out
        assert names(base) == ["worktree-fix"]

    @pytest.mark.parametrize(
        ("field", "name", "branch"),
        [("worktree_name", "fix", "worktree-fix"), ("name", "a/b\n", "worktree-a-b-")],
    )
    def test_names(self, base: Path, field: str, name: str, branch: str) -> None:
        done = hook(base, "create", self.payload(base, **{field: name}))
        assert Path(done.out.rstrip("\n")).name == f"@{branch}"

    def test_the_project_is_where_the_agent_was_started(self, base: Path) -> None:
        inner = base / "node_modules"
        payload = self.payload(inner, name="fix")
        done = hook(base, "create", payload, CLAUDE_PROJECT_DIR=str(base))
        assert done.code == 0
        assert names(base) == ["worktree-fix"]

    def test_an_unchanged_one_is_dropped_with_the_mount(self, base: Path) -> None:
        path = hook(base, "create", self.payload(base, name="fix")).out.rstrip("\n")
        done = hook(base, "remove", self.payload(base, worktree_path=path))
        assert (done.code, done.out, done.err) == (0, "", "")
        assert mounts_of(base) == []
        assert names(base) == []
        again = hook(base, "remove", self.payload(base, worktree_path=path))
        assert again.code == 0
        assert "nothing to remove" in again.err

    def test_a_changed_one_is_kept(self, base: Path) -> None:
        path = Path(hook(base, "create", self.payload(base, name="fix")).out.rstrip("\n"))
        (path / "made").write_text("x")
        done = hook(base, "remove", self.payload(base, worktree_path=str(path)))
        assert done.code == 0
        assert "kept branch worktree-fix with 1 changed path" in done.err
        assert (path / "made").read_text() == "x"
        assert branching(base, "commit", "worktree-fix").code == 0
        assert (base / "made").read_text() == "x"

    @pytest.mark.parametrize("text", ["", "[]", '{"cwd": "."}', '{"name": 3, "cwd": "."}'])
    def test_an_invalid_hook_payload_is_refused(self, base: Path, text: str) -> None:
        done = hook(base, "create", text)
        assert (done.code, done.out) == (2, "")
        assert "standard input" in done.err
        assert mounts_of(base) == []


def test_the_commands_of_the_plugin_work(base: Path) -> None:
    """Each hook of the plugin for Claude Code, as Claude Code runs it, and the project's skill."""
    plugin = ROOT / "plugins" / "claude-code"
    hooks = json.loads((plugin / "hooks" / "hooks.json").read_text())["hooks"]
    commands = {
        event: command["command"]
        for event, (matcher,) in hooks.items()
        for command in matcher["hooks"]
    }
    assert set(commands) == {"WorktreeCreate", "WorktreeRemove"}

    def run(event: str, **payload: str) -> str:
        done = subprocess.run(
            ["sh", "-c", commands[event]],
            input=json.dumps({"cwd": str(base), "hook_event_name": event, **payload}),
            capture_output=True,
            text=True,
            check=True,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "CLAUDE_PROJECT_DIR": str(base),
            },
        )
        return done.stdout.rstrip("\n")

    path = run("WorktreeCreate", name="fix")
    assert Path(path).is_dir()
    run("WorktreeRemove", worktree_path=path)
    assert not Path(path).exists()
    skill = plugin / "skills" / "branching" / "SKILL.md"
    assert skill.read_text() == (ROOT / "skills" / "branching" / "SKILL.md").read_text()
    market = json.loads((ROOT / ".claude-plugin" / "marketplace.json").read_text())
    (entry,) = market["plugins"]
    manifest = json.loads((plugin / ".claude-plugin" / "plugin.json").read_text())
    assert (ROOT / entry["source"]).resolve() == plugin
    assert entry["name"] == manifest["name"] == "branching"


def test_the_plugin_has_the_server_that_install_writes(base: Path) -> None:
    shown = branching(base, "mcp", "install", "claude", "--dry-run").out
    added = "".join(line[1:] for line in shown.splitlines(keepends=True) if line[:1] == "+")
    document = json.loads(added[added.index("{") :])
    plugin = json.loads((ROOT / "plugins" / "claude-code" / ".mcp.json").read_text())
    assert plugin == document
