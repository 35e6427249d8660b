"""The `branching` command, end to end on a real mount."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.branchfs import find_program, mounted, run
from support.command import OnTerminal, Running, branching

from branching import Workspace, __version__


@pytest.fixture
def root(real: Mounted) -> Path:
    """A real mount; no branch may be open at the end."""
    return real.root


def names(root: Path) -> list[str]:
    """The files in the workspace."""
    return sorted(entry.name for entry in root.iterdir())


def open_branches(root: Path) -> list[str]:
    space = Workspace(root)
    found = [record.name for record in space.branches()]
    space.close()
    return found


def committed(root: Path) -> list[str]:
    """The names of the branches that were committed."""
    commits = branching(root, "history", "--json").document["commits"]
    return [commit["branch"] for commit in commits]


class TestCommon:
    @pytest.mark.contract("6.1", "6.4")
    def test_without_a_command_it_shows_the_help(self, root: Path) -> None:
        done = branching(root)
        assert done.code == 0
        for command in ("run", "speculate", "best-of-n", "reflexion", "status"):
            assert command in done.out

    @pytest.mark.parametrize("is_utf8_mode", ["0", "1"])
    def test_names_are_bytes_in_any_locale(
        self, root: Path, tmp_path: Path, is_utf8_mode: str
    ) -> None:
        """The path of the workspace is one, too; Latin-1 takes it for other letters."""
        if shutil.which("localedef") is None:
            pytest.skip("localedef makes a locale that is not UTF-8")
        made = [*("localedef", "-i", "en_US", "-f", "ISO-8859-1"), str(tmp_path / "en_US")]
        subprocess.run(made, check=False)  # 1 for warnings
        locale = {"LOCPATH": str(tmp_path), "LC_ALL": "en_US", "PYTHONUTF8": is_utf8_mode}
        words = ["run", "-q", "-b", "caf\u00e9", "--on-success", "keep", "--"]
        done = branching(root, *words, "sh", "-c", "echo x > m\u00fc; echo s\u00e9", **locale)
        assert (done.code, done.out, done.err) == (0, "s\u00e9\n", "")
        assert branching(root, "log", "caf\u00e9", **locale).out == "s\u00e9\n"
        assert branching(root, "diff", "caf\u00e9", **locale).out == "A m\u00fc\n"
        for words in (["ls"], ["status"], ["log"], ["diff", "caf\u00e9"]):
            assert branching(root, *words, "--json", **locale).document["command"] == words[0]
        assert branching(root, "commit", "--only", "m\u00fc", "caf\u00e9", **locale).code == 0
        assert (root / "m\u00fc").exists()

    @pytest.mark.contract("6.63")
    def test_it_prints_its_version(self, root: Path) -> None:
        """The published command has no --version and exits with 2."""
        assert branching(root, "--version").out == f"branching {__version__}\n"

    @pytest.mark.parametrize("command", ["run", "speculate", "best-of-n", "reflexion", "status"])
    def test_every_command_has_help_with_an_example(self, root: Path, command: str) -> None:
        done = branching(root, command, "--help")
        assert done.code == 0
        assert "--workspace" in done.out
        assert "--json" in done.out
        assert command == "status" or "Example: branching" in done.out

    @pytest.mark.contract("6.4", "6.7")
    @pytest.mark.parametrize(
        "words",
        [
            ["run", "--no-such-option"],
            ["no-such-command"],
            ["run", "--timeout", "soon", "true"],
            ["run", "--timeout", "0", "true"],
            ["run", "--timeout", "-1", "true"],
            ["run", "--on-error", "shrug", "true"],
            ["best-of-n", "-n", "0", "true"],
            ["best-of-n", "-n", "x", "true"],
            ["reflexion", "--retries", "0", "true"],
            ["status", "extra"],
            ["run"],
            ["run", "--"],
            ["best-of-n"],
            ["reflexion"],
            ["speculate"],
            ["run", "--ask", "true"],
            ["run", "--memory-limit", "0", "true"],
        ],
        ids=" ".join,
    )
    def test_a_wrong_call_exits_with_2_and_does_nothing(self, root: Path, words: list[str]) -> None:
        done = branching(root, *words)
        assert done.code == 2
        assert done.out == ""
        assert done.err
        assert names(root) == [NAME_FROM]

    @pytest.mark.contract("6.7")
    def test_a_missing_command_has_the_published_message(self, root: Path) -> None:
        assert branching(root, "run").err == "error: no command specified; use -- CMD...\n"

    @pytest.mark.contract("6.2")
    def test_the_workspace_is_found_from_below_and_by_option(
        self, root: Path, tmp_path: Path
    ) -> None:
        (root / "deep").mkdir()
        assert branching(root / "deep", "status", "--json").document["workspace"] == str(root)
        assert branching(tmp_path, "status", "-w", str(root)).code == 0
        assert branching(tmp_path, "status", "--workspace", str(root / "deep")).code == 0

    @pytest.mark.contract("6.4", "6.5")
    def test_a_missing_workspace_has_the_published_message(
        self, root: Path, tmp_path: Path
    ) -> None:
        done = branching(tmp_path, "run", "true", BRANCHFS="/no/such")
        text = "no branchfs mount found for current directory; use -w/--workspace"
        assert (done.code, done.err.splitlines()[0]) == (125, f"error: {text}")
        done = branching(tmp_path, "status", "--json", BRANCHFS="/no/such")
        assert (done.code, done.out, json.loads(done.err)["error"]) == (125, "", text)
        done = branching(root, "status", "-w", "/no/such")
        assert (done.code, done.err) == (125, "error: workspace path does not exist: /no/such\n")

    def test_a_dead_daemon_is_named(self, root: Path) -> None:
        space = Workspace(root)
        pid = space._backend._control.request("info", {})["pid"]  # type: ignore[attr-defined]
        space.close()
        os.kill(pid, signal.SIGKILL)
        done = branching(root.parent, "status", "-w", str(root))
        assert done.code == 125
        assert "error: " in done.err
        subprocess.run(["umount", "-l", str(root)], check=True)
        run(find_program(), "mount", "--base", str(root.parent / "base"), str(root))

    def test_without_the_extra_it_names_the_command_to_install_it(self, root: Path) -> None:
        """Style: extras fail with the command that fixes them."""
        script = "import sys; sys.modules['typer'] = None\nfrom branching.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 125
        assert 'pip install ".[cli]" in the source tree' in done.stderr


class TestRun:
    @pytest.mark.contract("6.10", "6.12", "6.15")
    def test_success_commits(self, root: Path) -> None:
        done = branching(root, "run", "--", "sh", "-c", "echo x > made; echo said; echo e >&2")
        assert (done.code, done.out) == (0, "said\n")
        own, outcome = done.err.splitlines()
        assert own == "e"
        assert outcome == "✓ committed 1 path (+1) · undo: branching undo"
        assert re.fullmatch(r"run-[0-9a-f]{8}", committed(root)[0])
        assert names(root) == ["made", NAME_FROM]

    @pytest.mark.contract("6.10", "6.11")
    @pytest.mark.parametrize(
        ("command", "code"),
        [
            (["sh", "-c", "echo x > made; exit 7"], 7),
            (["sh", "-c", "echo x > made; kill -9 $$"], 137),
            (["sh", "-c", "echo x > made; kill -TERM $$"], 143),
            (["no-such-program"], 127),
            (["/etc/passwd"], 126),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
    )
    def test_failure_aborts_with_the_commands_own_code(
        self, root: Path, command: list[str], code: int
    ) -> None:
        done = branching(root, "run", "--json", "--", *command)
        assert done.code == code
        assert done.document["exit_code"] == code
        assert done.document["action"] == "aborted"
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []

    @pytest.mark.contract("6.3", "6.15")
    def test_json_is_alone_on_stdout(self, root: Path) -> None:
        """The command's own output goes to stderr."""
        done = branching(root, "run", "--json", "-b", "mine", "--", "echo", "noise")
        assert done.document == {
            "version": 1,
            "command": "run",
            "branch": "mine",
            "commit": None,
            "exit_code": 0,
            "action": "committed",
            "ended": "exit",
            "changes": [],
            "remaining": 0,
        }
        assert done.err == "noise\n"

    @pytest.mark.contract("6.6")
    @pytest.mark.parametrize(
        ("words", "heard"),
        [
            (["--", "printf", "%s|", "-w", "--", "--json"], "-w|--|--json|"),
            (["printf", "%s|", "-w", "--", "-x"], "-w|--|-x|"),
            (["--", "--", "x"], None),
        ],
        ids=["dashes", "no dashes", "second dashes kept"],
    )
    def test_the_first_dashes_end_our_options_and_are_optional(
        self, root: Path, words: list[str], heard: str | None
    ) -> None:
        done = branching(root, "run", *words)
        if heard is None:
            assert (done.code, done.err[:10]) == (127, "error: --:")
        else:
            assert done.out.startswith(heard)

    @pytest.mark.contract("2.17")
    def test_the_name_is_the_users(self, root: Path) -> None:
        done = branching(root, "run", "-b", "fix né 1", "--", "printenv", "BRANCHING_BRANCH")
        assert done.out.splitlines()[0] == "fix né 1"

    def test_the_command_sees_the_branch_at_the_workspaces_own_path(self, root: Path) -> None:
        """Design 7: what stores absolute paths, a virtualenv or a build, is valid after commit."""
        done = branching(root, "run", "--", "sh", "-c", 'pwd; pwd > made; test "$PWD" = "$(pwd)"')
        assert (done.code, done.out.splitlines()[0]) == (0, str(root))
        assert (root / "made").read_text() == f"{root}\n"

    @pytest.mark.parametrize("name", ["a/b", "a\nb", "", "..", "@x", "x" * 300])
    def test_an_impossible_name_is_refused(self, root: Path, name: str) -> None:
        """Bad input"""
        done = branching(root, "run", "-b", name, "--", "touch", "made")
        assert done.code == 2
        assert "cannot be the name of a branch" in done.err
        assert names(root) == [NAME_FROM]

    @pytest.mark.contract("6.13")
    @pytest.mark.parametrize(
        ("options", "code", "action", "is_there"),
        [
            (["--on-error", "none"], 1, "kept", False),
            (["--on-error", "keep"], 1, "kept", False),
            (["--on-error", "commit"], 1, "committed", True),
            (["--on-error", "abort"], 1, "aborted", False),
            (["--on-success", "keep"], 0, "kept", False),
            (["--on-success", "abort"], 0, "aborted", False),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
    )
    def test_the_end_of_the_branch_can_be_chosen(
        self, root: Path, options: list[str], code: int, action: str, is_there: bool
    ) -> None:
        script = f"echo x > made; exit {code}"
        done = branching(root, "run", "-b", "b", *options, "--json", "--", "sh", "-c", script)
        assert (done.code, done.document["action"]) == (code, action)
        assert ("made" in names(root)) == is_there
        assert open_branches(root) == (["b"] if action == "kept" else [])
        if action == "kept":
            assert (root / "@b" / "made").read_text() == "x\n"
            space = Workspace(root)
            space._backend.abort(space.branches()[0])
            space.close()

    def test_the_timeout_exits_with_124_and_aborts(self, root: Path) -> None:
        done = branching(root, "run", "--timeout", "0.3s", "--", "sh", "-c", "echo x > m; sleep 60")
        assert done.code == 124
        assert done.err == "✗ timed out (exit code 124) · aborted, nothing was changed\n"
        assert names(root) == [NAME_FROM]

    def test_the_timeout_is_a_failure_like_others(self, root: Path) -> None:
        words = ["--timeout", "3", "--on-error", "commit", "--", "sh", "-c"]
        done = branching(root, "run", *words, "echo x > made; sleep 60")
        assert (done.code, names(root)) == (124, ["made", NAME_FROM])

    def test_standard_input_is_the_commands(self, root: Path) -> None:
        done = branching(root, "run", "--", "cat", stdin="typed\n")
        assert done.out.startswith("typed\n")

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_streams_that_are_closed_are_empty(self, root: Path, closed: str) -> None:
        """Another file would get their numbers: a command that reads its input never ended."""
        words = [sys.executable, "-m", "branching", "run", "--", "sh", "-c"]
        line = shlex.join([*words, "cat; echo out; echo err >&2; echo x > made"])
        done = subprocess.run(
            ["sh", "-c", f"{line} {closed}"], cwd=root, capture_output=True, timeout=60, check=False
        )
        assert (done.returncode, names(root)) == (0, ["made", NAME_FROM])
        assert b"Traceback" not in done.stderr

    def test_a_json_document_that_cannot_be_written_is_an_error_of_its_own(
        self, root: Path
    ) -> None:
        """The work may be done all the same."""
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "branching", "speculate", "--json", "-c", "echo x > made"],
                cwd=root,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert (done.returncode, names(root)) == (125, ["made", NAME_FROM])
        failure = json.loads(done.stderr)
        assert "could not be printed" in failure["error"]
        assert "branching history" in failure["hint"]

    @pytest.mark.contract("6.4")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_ends_everything(self, root: Path, number: signal.Signals) -> None:
        run = Running(root, ["run", "--", "sh", "-c", "echo x > made; echo up >&2; sleep 60"])
        run.wait_for_line("up")
        run.signal(number)
        done = run.done()
        assert done.code == 128 + number
        assert done.out == ""
        assert "nothing was committed" in done.err
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []

    def test_two_signals_end_it_in_order_too(self, root: Path) -> None:
        script = "trap '' INT TERM; echo up >&2; while :; do sleep 1; done"
        run = Running(root, ["run", "--", "sh", "-c", script])
        run.wait_for_line("up")
        run.signal(signal.SIGINT)
        time.sleep(0.2)  # two of a kind at once are one
        run.signal(signal.SIGTERM)
        assert run.done().code == 130
        assert open_branches(root) == []

    def test_background_processes_go_with_the_command(self, root: Path) -> None:
        """The fixture looks for processes left in branches."""
        done = branching(root, "run", "--", "sh", "-c", "sleep 300 & echo x > made")
        assert (done.code, names(root)) == (0, ["made", NAME_FROM])


class TestRunAsTheOwner:
    def test_files_belong_to_the_owner_of_the_workspace(
        self, place: Path, as_user: tuple[int, int]
    ) -> None:
        base = place / "owned"
        base.mkdir()
        (base / NAME_FROM).write_text("seed\n")
        os.chown(base, *as_user)
        os.chown(base / NAME_FROM, *as_user)
        script = "id -u; id -g; echo $HOME; touch $HOME/x made; echo x >> seed.txt; mkdir -p d/e"
        with mounted(base, place / "mount") as root:
            done = branching(root, "run", "--", "sh", "-c", script)
        uid, gid, home = done.out.splitlines()[:3]
        assert (done.code, int(uid), int(gid)) == (0, *as_user), done.err
        assert not Path(home).exists()
        for name in ("made", "seed.txt", "d", "d/e"):
            found = (base / name).stat()
            assert (found.st_uid, found.st_gid) == as_user, name


class TestOnATerminal:
    @pytest.mark.contract("6.14")
    def test_ask_commits_on_yes_only(self, root: Path) -> None:
        """This holds for any exit code. Other answers ask again; end of input means no."""
        for keys, code, mark, said in (
            ("maybe\ny\n", 3, "✗", "exit code 3 · committed 1 path (+1)"),
            ("no\n", 0, "✓", "aborted, nothing was changed"),
        ):
            script = f"echo {code} > made; exit {code}"
            run = OnTerminal(root, ["run", "--ask", "--", "sh", "-c", script])
            for key in keys.splitlines(keepends=True):
                run.wait_for("Commit changes? [y/n] ")
                run.seen = ""
                run.type(key)
            done = run.done()
            assert (done.code, mark in done.out and said in done.out) == (code, True), done.out
        assert (root / "made").read_text() == "3\n"
        run = OnTerminal(root, ["run", "--ask", "--", "touch", "other"])
        run.wait_for("A other")
        run.wait_for("[y/n] ")
        run.type("\x04")
        assert "aborted, nothing was changed" in run.done().out

    def test_ctrl_c_at_the_question_aborts(self, root: Path) -> None:
        run = OnTerminal(root, ["run", "--ask", "--", "touch", "made"])
        run.wait_for("[y/n] ")
        run.type("\x03")
        assert run.done().code == 130
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []

    def test_ctrl_c_reaches_the_command(self, root: Path) -> None:
        run = OnTerminal(root, ["run", "--", "sh", "-c", "touch made; echo up; exec sleep 60"])
        run.wait_for("up")
        run.type("\x03")
        done = run.done()
        assert (done.code, "exit code 130 · aborted" in done.out) == (130, True)
        assert names(root) == [NAME_FROM]

    def test_a_command_that_handles_ctrl_c_decides_itself(self, root: Path) -> None:
        script = (
            "import signal, sys, time\n"
            "def caught(*_): open('made', 'w'); sys.exit(0)\n"
            "signal.signal(signal.SIGINT, caught)\n"
            "print('up', flush=True)\n"
            "while True: time.sleep(0.05)  # pause() would lose a signal just before it"
        )
        run = OnTerminal(root, ["run", "--", sys.executable, "-c", script])
        run.wait_for("up")
        run.type("\x03")
        done = run.done()
        assert (done.code, "committed 1 path (+1)" in done.out) == (0, True), done.out
        assert names(root) == ["made", NAME_FROM]

    def test_the_command_has_the_terminal(self, root: Path) -> None:
        script = "test -t 0 && test -t 1 && read answer < /dev/tty && echo got $answer"
        run = OnTerminal(root, ["run", "--", "sh", "-c", script])
        run.type("typed\n")
        done = run.done()
        assert (done.code, "got typed" in done.out) == (0, True), done.out

    def test_ctrl_z_without_a_shell_above_does_not_hang(self, root: Path) -> None:
        run = OnTerminal(root, ["run", "--", "sh", "-c", "echo up; read line; echo down $line"])
        run.wait_for("up")
        run.type("\x1a")
        run.type("here\n")
        run.wait_for("down here")
        assert run.done().code == 0

    def test_ctrl_z_under_a_shell_stops_and_fg_continues(self, root: Path) -> None:
        """The command is not a shell: a shell cannot be stopped while it waits, in vfork(), for a
        child that is already stopped."""
        run = OnTerminal(root, [], program=["bash", "--norc", "--noprofile", "-i"], PS1="in> ")
        run.wait_for("in> ")
        waits = (
            'import os, time; print("u" "p", flush=True); '
            '[time.sleep(0.05) for _ in iter(lambda: os.path.exists("go"), True)]'
        )
        run.type(f"{sys.executable} -m branching run -w '{root}' -- python3 -c '{waits}'\n")
        run.wait_for("up")
        run.type("\x1a")
        run.wait_for("Stopped")
        run.type("fg\n")
        with Workspace(root) as space:
            (space.branches()[0].path / "go").touch()
        run.wait_for("committed 1 path")
        run.type("exit 5\n")
        assert run.done().code == 5

    def test_the_race_is_shown_as_a_table(self, root: Path) -> None:
        words = ["speculate", "-c", "echo trying; sleep 3", "-c", "echo no; exit 3"]
        run = OnTerminal(root, words)
        done = run.done()
        assert done.code == 0
        for text in ("candidate", "last output", "running", "trying", "failed", "won"):
            assert text in done.out, text
        assert "candidate 0 won · nothing to commit" in done.out
        assert "[1] fail" not in done.out, "the table has shown it"

    def test_no_color_has_no_colours(self, root: Path) -> None:
        done = OnTerminal(root, ["speculate", "-c", "echo x"], NO_COLOR="1").done()
        assert "\x1b[3" not in done.out
        done = OnTerminal(root, ["speculate", "-c", "echo x"], TERM="dumb").done()
        assert "\x1b" not in done.out
        assert "[0] x\n" in done.out


class TestSpeculate:
    @pytest.mark.contract("6.20", "6.22")
    def test_the_first_success_is_committed(self, root: Path) -> None:
        done = branching(
            root,
            "speculate",
            *("-c", "echo bad; exit 3"),
            *("--candidate", "sleep 3; echo good > made; echo done >&2"),
            *("-c", "sleep 60"),
        )
        assert done.code == 0
        assert done.out == (
            "  [0] fail: echo bad; exit 3 (exit 3)\n"
            "  [1] ok: sleep 3; echo good > made; echo done >&2\n"
            "  [2] cancelled: sleep 60\n"
        )
        *heard, result = done.err.splitlines()
        assert sorted(heard) == ["[0] bad", "[1] done"]
        assert result == "✓ candidate 1 won · committed 1 path (+1) · undo: branching undo"
        assert (root / "made").read_text() == "good\n"
        assert open_branches(root) == []

    @pytest.mark.contract("6.21")
    def test_its_document(self, root: Path) -> None:
        done = branching(root, "speculate", "--json", "-c", "echo x; exit 3", "-c", "sleep 3")
        facts = done.document
        assert {key: facts[key] for key in ("command", "committed", "winner", "candidates")} == {
            "command": "speculate",
            "committed": True,
            "winner": 1,
            "candidates": 2,
        }
        first = facts["results"][0]
        assert first.pop("branch").startswith("speculate-")
        assert first | {"seconds": 0} == {
            "index": 0,
            "success": False,
            "error": "exit 3",
            "state": "failed",
            "ended": "exit",
            "exit_code": 3,
            "seconds": 0,
            "label": "echo x; exit 3",
            "changes": {"added": 0, "modified": 0, "deleted": 0, "renamed": 0},
        }
        assert facts["results"][1]["success"] is True
        assert "error" not in facts["results"][1]

    @pytest.mark.contract("6.21", "6.22")
    def test_no_success_exits_with_1(self, root: Path) -> None:
        done = branching(root, "speculate", "-c", "touch made; false", "-c", "kill -SEGV $$")
        assert done.code == 1
        assert done.err.endswith("✗ no candidate succeeded · nothing was changed\n")
        assert "(killed by SIGSEGV)" in done.out
        assert names(root) == [NAME_FROM]
        facts = branching(root, "speculate", "--json", "-c", "false").document
        assert (facts["committed"], facts["winner"]) == (False, None)

    def test_the_timeout_exits_with_124(self, root: Path) -> None:
        done = branching(root, "speculate", "--timeout", "0.3", "-c", "sleep 60", "-c", "false")
        assert done.code == 124
        assert "(timed out after 0.3 s)" in done.out

    def test_a_signal_ends_all_candidates(self, root: Path) -> None:
        run = Running(root, ["speculate", "-c", "echo up; sleep 60", "-c", "sleep 60"])
        run.wait_for_line("up")
        run.signal(signal.SIGTERM)
        done = run.done()
        assert (done.code, done.out) == (143, "")
        assert open_branches(root) == []


class TestBestOfN:
    @pytest.mark.contract("6.30", "6.31", "6.32", "6.33", "6.34")
    def test_the_best_success_is_committed(self, root: Path) -> None:
        script = (
            "echo $BRANCHING_ATTEMPT > made; test $BRANCHING_ATTEMPT = 3 && exit 1; "
            "echo 0.$BRANCHING_ATTEMPT >&3"
        )
        done = branching(root, "best-of-n", "-n", "4", "--", "sh", "-c", script)
        assert done.code == 0
        assert done.out == (
            "  [0] ok   (0.00)\n  [1] ok   (0.10)\n  [2] ok   (0.20)\n  [3] fail (0.00) (exit 1)\n"
        )
        assert "✓ attempt 2 won (0.20) · committed 1 path (+1)" in done.err
        assert (root / "made").read_text() == "2\n"

    @pytest.mark.contract("6.31", "6.33")
    def test_its_document(self, root: Path) -> None:
        """A missing score is 1.0 for a success and 0.0 for a failure."""
        facts = branching(root, "best-of-n", "--json", "--", "sh", "-c", "exit 0").document
        assert (facts["n"], facts["committed"]) == (3, True)
        assert facts["winner"] == {"index": 0, "score": 1.0}
        assert [result["score"] for result in facts["results"]] == [1.0] * 3
        done = branching(root, "best-of-n", "--json", "-n", "2", "--", "false")
        assert done.code == 1
        assert done.document["winner"] is None
        assert [result["score"] for result in done.document["results"]] == [0.0] * 2

    @pytest.mark.contract("6.34")
    def test_best_of_n_without_success_says_that_nothing_changed(self, root: Path) -> None:
        done = branching(root, "best-of-n", "false")
        assert done.err.endswith("✗ no attempt succeeded · nothing was changed\n")


class TestReflexion:
    @pytest.mark.contract("6.40", "6.41", "6.42", "6.43")
    def test_it_learns(self, root: Path) -> None:
        script = 'echo "$BRANCHING_ATTEMPT:$BRANCHING_FEEDBACK" > made; test $BRANCHING_ATTEMPT = 2'
        done = branching(
            root,
            *("reflexion", "--retries", "5", "--critique", 'echo " saw $(cat made) "; exit 1'),
            *("--", "sh", "-c", script),
        )
        assert done.code == 0
        assert done.out == (
            "attempt 0: fail (exit 1)\nattempt 1: fail (exit 1)\nattempt 2: ok (committed)\n"
        )
        assert (root / "made").read_text() == "2:saw 1:saw 0:\n"

    @pytest.mark.contract("6.42")
    def test_its_document(self, root: Path) -> None:
        done = branching(root, "reflexion", "--json", "--retries", "2", "false")
        assert done.code == 1
        facts = done.document
        assert (facts["command"], facts["committed"]) == ("reflexion", False)
        assert (facts["attempts"], facts["winner"]) == (2, None)
        assert [result["index"] for result in facts["results"]] == [0, 1]

    @pytest.mark.contract("6.43")
    def test_reflexion_without_success_says_that_nothing_changed(self, root: Path) -> None:
        done = branching(root, "reflexion", "false")
        assert done.code == 1
        assert done.err.endswith("✗ no attempt succeeded · nothing was changed\n")


class TestStatus:
    @pytest.mark.contract("2.17", "6.50")
    def test_it_lists_the_branches_by_name(self, root: Path) -> None:
        done = branching(root, "status")
        assert done.out == f"workspace: {root}\nfstype: branchfs\nbranches: (none)\n"
        space = Workspace(root)
        with space.branch("one") as one, space.branch("two") as two:
            assert branching(root, "status").out.endswith("branches (2):\n  one\n  two\n")
            assert branching(root, "status", "--json").document == {
                "version": 1,
                "command": "status",
                "workspace": str(root),
                "base": str(root.parent / "base"),
                "policy": "first-winner",
                "fstype": "branchfs",
                "driver_reason": "fuse was asked for",
                "recovered": False,
                "branches": ["one", "two"],
            }
            one.abort()
            two.abort()
        space.close()

    def test_status_says_why_the_driver_is_not_overlay(self, place: Path) -> None:
        (place / "base").mkdir()
        with Workspace.mount(place / "base", policy="snapshot") as space:
            out = branching(space.root, "status").out
            assert "driver: fuse, not overlay: it supports only the policy first-winner\n" in out


class TestKeptBranches:
    """A kept branch can be inspected, committed or dropped later."""

    @pytest.fixture
    def kept(self, root: Path) -> str:
        script = "echo x > made; rm seed.txt"
        words = ["run", "-b", "kept", "--on-success", "keep", "--", "sh", "-c", script]
        assert branching(root, *words).code == 0
        return "kept"

    def test_it_is_listed_and_compared(self, root: Path, kept: str) -> None:
        [entry] = branching(root, "ls", "--json").document["branches"]
        assert (entry["name"], entry["state"]) == (kept, "live")
        assert entry["path"] == str(root / "@kept")
        assert branching(root, "ls").out.startswith("kept  live")
        assert branching(root, "diff", kept).out == f"A made\nD {NAME_FROM}\n"
        changes = branching(root, "diff", "--json", kept).document["changes"]
        assert [change["path"] for change in changes] == ["made", NAME_FROM]
        assert branching(root, "abort", kept).code == 0

    def test_it_is_committed_later(self, root: Path, kept: str) -> None:
        done = branching(root, "commit", kept)
        said = "✓ committed 2 paths (+1 -1) · undo: branching undo\n"
        assert (done.code, done.out, done.err) == (0, "", said)
        assert names(root) == ["made"]
        assert open_branches(root) == []

    def test_it_is_dropped_later(self, root: Path, kept: str) -> None:
        done = branching(root, "abort", "--json", kept)
        assert (done.code, done.document["action"]) == (0, "aborted")
        assert names(root) == [NAME_FROM]
        assert open_branches(root) == []

    def test_opposite_wishes_are_a_wrong_call(self, root: Path, kept: str) -> None:
        assert branching(root, "commit", "--force", "--skip", kept).code == 2
        assert open_branches(root) == [kept]
        assert branching(root, "abort", kept).code == 0

    @pytest.mark.parametrize("command", ["diff", "commit", "abort"])
    def test_a_branch_that_is_not_there_is_named(self, root: Path, command: str) -> None:
        done = branching(root, command, "nope")
        assert done.code == 125
        assert "no branch 'nope' is open" in done.err
        assert "Hint: branching ls lists them" in done.err
