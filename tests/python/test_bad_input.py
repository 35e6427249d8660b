"""Bad input, row by row: one clear text, the right exit code, nothing changed, nothing left.

Wrong calls are made in this process, which is quick; what goes wrong in the middle of a call is
done to the command in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import NAME_FROM, Mounted
from support.branchfs import await_dead, daemon_of, find_program, mounted
from support.command import Running, branching
from typer.testing import CliRunner

from branching import MountError, Workspace
from branching._linux.mountinfo import read_mounts
from branching.cli.app import app
from branching.fs.automount import PREFIX

WRONG_CALLS = {
    # option, size, duration, count
    "run --no-such-option true": "No such option",
    "no-such-command": "No such command",
    "run --timeout soon true": "'soon' is not a duration; write 90, 90s, 5m or 1.5h",
    "run --timeout 0 true": "a duration must be more than zero",
    "run --timeout 0s true": "a duration must be more than zero",
    "run --timeout -1 true": "'-1' is not a duration",
    "run --timeout nan true": "'nan' is not a duration",
    "run --timeout 1d true": "'1d' is not a duration",
    "cascaded --wave-timeout 0 true": "a duration must be more than zero",
    "run --on-error shrug true": "'shrug' is not one of",
    "speculate --on-error commit -c true": "'commit' is not one of",
    "speculate --on-success shrug -c true": "'shrug' is not one of",
    "best-of-n -n 0 true": "Invalid value for '-",
    "best-of-n -n -3 true": "Invalid value for '-",
    "best-of-n -n 1.5 true": "Invalid value for '-n'",
    "best-of-n -n many true": "Invalid value for '-n'",
    "best-of-n --parallel 0 true": "Invalid value for '-",
    "reflexion --retries 0 true": "Invalid value for '-",
    "beam-search --beam-width 0 -c true --expand true": "Invalid value for '-",
    "beam-search --max-depth 0 -c true --expand true": "Invalid value for '-",
    "tree-of-thoughts --max-depth 0 -c true": "Invalid value for '-",
    "cascaded --fan-out 0 true": "'0' is not a list of widths; write 1,2,4",
    "cascaded --fan-out 1,,2 true": "'1,,2' is not a list of widths",
    "cascaded --fan-out 1,-2 true": "'1,-2' is not a list of widths",
    "cascaded --fan-out x true": "'x' is not a list of widths",
    "tournament -n 0 --judge true true": "Invalid value for '-",
    "prune --keep -1": "Invalid value for '-",
    "run --timeout NINES true": "a duration must be finite",
    "run --memory-limit 512X true": "'512X' is not a size",
    "run --memory-limit 0 true": "a size must be more than zero",
    "run --memory-limit 99999999999T true": "a size must be 9223372036854775807 or less",
    "run --disk-limit 99999999999T true": "a size must be 9223372036854775807 or less",
    "run --pids-limit 0 true": "Invalid value for '--pids-limit'",
    "run --pids-limit 99999999999999999999 true": "Invalid value for '--pids-limit'",
    "run --cpu-limit nan true": "cpu must be more than zero",
    "run --cpu-limit 1e300 true": "cpu must be 100000 or less",
    "speculate --group-memory-limit 1Q -c true": "'1Q' is not a size",
    "cascaded --fan-out NINES true": "is not a list of widths",
    "mcp --http 99999": "Invalid value for '--http'",
    "mcp --max-time 0": "a duration must be more than zero",
    "mcp --token-file x": "--token-file is for --http",
    "fork -n 0 true": "Invalid value for '-n'",
    "fork -c true --label a --label b": "labels must be unique, with no more labels than branches",
    "commit --policy best x": "'best' is not one of",
    "diff -p --stat x": "--patch cannot be combined with",
    "undo --force=yes": "does not take a value",
    "completion tcsh": "'tcsh' is not one of",
    # empty: a variable of the caller's that was not set
    "run -- EMPTY": "the program, is empty",
    "best-of-n -- EMPTY": "the program, is empty",
    "speculate -c EMPTY": "Invalid value for '-c' / '--candidate': it is empty",
    "speculate -c true -c BLANK": "Invalid value for '-c' / '--candidate': it is empty",
    "speculate --setup EMPTY -c true": "Invalid value for '--setup': it is empty",
    "speculate --select EMPTY -c true": "Invalid value for '--select': it is empty",
    "best-of-n --judge EMPTY true": "it is empty",
    "reflexion --critique EMPTY true": "Invalid value for '--critique': it is empty",
    "tournament --judge EMPTY -c true": "Invalid value for '--judge': it is empty",
    "beam-search -c true --expand EMPTY": "Invalid value for '--expand': it is empty",
    "commit --only EMPTY x": "Invalid value for '--only': it is empty",
    # missing, or too much
    "run": "no command specified; use -- CMD...",
    "run --": "no command specified; use -- CMD...",
    "best-of-n": "no command specified; use -- CMD...",
    "reflexion": "no command specified; use -- CMD...",
    "cascaded": "no command specified; use -- CMD...",
    "speculate": "no candidates; give at least one with -c CMD",
    "tree-of-thoughts": "no candidates; give at least one with -c CMD",
    "beam-search": "no candidates; give at least one with -c CMD",
    "beam-search -c true": "a beam search needs --expand CMD",
    "tournament": "give either one command (-- CMD...) or candidates (-c CMD)",
    "tournament -c true true": "give either one command (-- CMD...) or candidates (-c CMD)",
    "tournament -c true -n 2 --judge true": "-n needs a single command",
    "tournament true": "a tournament needs a judge",
    "speculate true": "unexpected extra argument",
    "commit": "Missing argument",
    "diff": "Missing argument",
    "abort": "Missing argument",
    "commit --force --skip x": "--force and --skip exclude each other",
    "status extra": "unexpected extra argument",
    "undo one two": "unexpected extra argument",
    "run --ask true": "--ask needs a terminal",
    # names
    "run -b a/b true": "'a/b' cannot be the name of a branch: it has a `/`",
    "run -b @a true": "'@a' cannot be the name of a branch: it starts with `@`",
    "run -b .. true": "'..' cannot be the name of a branch",
    "log nope": "no output is kept under 'nope'",
}

WRITTEN = {"EMPTY": "", "BLANK": " ", "NINES": "9" * 5000}
"""Words of the table that cannot be written in it."""

OUR_FAILURES = {
    "diff nope": "no branch 'nope' is open",
    "commit nope": "no branch 'nope' is open",
    "abort nope": "no branch 'nope' is open",
    "shell nope": "no branch 'nope' is open",
    "undo": "nothing was undone: there is no commit to undo",
    "export nope -o /no/such": "no branch 'nope' is open",
    "load new /no/such": "error: /no/such: No such file or directory",
    "load new seed.txt": "branch 'new' was not imported",
    "load a/b seed.txt": "'a/b' cannot be the name of a branch",
    "redo": "nothing was redone",
    "run -w /no/such true": "workspace path does not exist: /no/such",
    "run -w /etc/passwd true": "workspace path does not exist: /etc/passwd",
}


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


@pytest.fixture
def root(real: Mounted) -> Iterator[Path]:
    """A real mount; nothing of it may have changed at the end."""
    yield real.root
    if real.root.is_mount():
        check_unchanged(real.root)


@pytest.fixture(scope="module")
def shared(scratch: Path) -> Iterator[Path]:
    """One mount for all calls that do nothing."""
    place = Path(tempfile.mkdtemp(prefix="bad ", dir=scratch))
    (place / "base").mkdir()
    (place / "base" / NAME_FROM).write_text("seed\n")
    with mounted(place / "base", place / "mount") as point:
        yield point
    shutil.rmtree(place)


def check_unchanged(root: Path) -> None:
    assert names(root) == [NAME_FROM]
    with Workspace(root) as space:
        assert space.branches() == []
        assert space.history() == []


def call(root: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> tuple[int, str, str]:
    monkeypatch.chdir(root)
    words = [WRITTEN.get(word, word) for word in text.split()]
    done = CliRunner().invoke(app, words, prog_name="branching")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    # What is too long for a line is broken into several.
    return done.exit_code, done.stdout, " ".join(done.stderr.split())


@pytest.mark.contract("6.4", "6.7")
@pytest.mark.parametrize(("words", "text"), WRONG_CALLS.items(), ids=WRONG_CALLS)
def test_a_wrong_call_exits_with_2(
    shared: Path, monkeypatch: pytest.MonkeyPatch, words: str, text: str
) -> None:
    code, out, err = call(shared, monkeypatch, words)
    assert (code, out) == (2, "")
    assert text in err
    assert "Traceback" not in err
    check_unchanged(shared)


@pytest.mark.contract("6.4", "6.5")
@pytest.mark.parametrize(("words", "text"), OUR_FAILURES.items(), ids=OUR_FAILURES)
def test_a_refused_request_exits_with_125(
    shared: Path, monkeypatch: pytest.MonkeyPatch, words: str, text: str
) -> None:
    code, out, err = call(shared, monkeypatch, words)
    assert (code, out) == (125, "")
    assert err.startswith("error: ")
    assert text in err
    check_unchanged(shared)


def test_a_selection_that_takes_nothing_loses_nothing(root: Path) -> None:
    """Whether of a kept branch or of a winner: the commit is refused, the work is still there."""
    assert branching(root, "run", "-b", "kept", "--on-success", "keep", "touch", "made").code == 0
    done = branching(root, "commit", "kept", "--only", "/etc", "--only", "mad")
    assert (done.code, done.out) == (125, "")
    assert "none of the 1 paths that branch kept changed matches '/etc mad'" in done.err
    done = branching(root, "commit", "kept", "--exclude", "made")
    assert (done.code, done.out) == (125, "")
    assert "is outside 'made'" in done.err
    assert "the first is 'made'" in done.err
    done = branching(root, "speculate", "--select", "src/*", "-c", "touch other")
    assert (done.code, done.out) == (125, "")
    assert "the work is kept in branch 'speculate-" in done.err
    with Workspace(root) as space:
        kept = {record.name: space.reopen(record.name) for record in space.branches()}
        assert len(kept) == 2
        for branch in kept.values():
            assert len(branch.diff()) == 1
            branch.abort()


def test_the_error_names_a_branch_name_that_is_taken(root: Path) -> None:
    with Workspace(root) as space, space.branch("taken") as taken:
        done = branching(root, "run", "-b", "taken", "touch", "made")
        assert (done.code, done.out) == (125, "")
        assert "taken" in done.err
        taken.abort()


@pytest.mark.parametrize("command", ["run", "speculate"])
def test_a_daemon_that_dies_in_the_middle(root: Path, real: Mounted, command: str) -> None:
    """The base is as it was, and the next mount finds no half of anything."""
    script = "echo x > made; echo up >&2; while echo x > made; do sleep 0.05; done; exit 0"
    words = ["--", "sh", "-c", script] if command == "run" else ["-c", script]
    run = Running(root.parent, [command, "-w", str(root), *words])
    run.wait_for_line("up")
    os.kill(daemon_of(root), signal.SIGKILL)
    done = run.done()
    assert done.code == 125, done
    assert done.err.count("error: ") == 1
    assert "Traceback" not in done.err
    assert "the BranchFS daemon of" in done.err
    assert "is gone" in done.err
    subprocess.run(["umount", "-l", str(root)], check=True)
    assert (real.base / NAME_FROM).read_text() == "seed\n"
    assert not (real.base / "made").exists()
    program = find_program()
    subprocess.run([program, "mount", "--base", str(real.base), str(root)], check=True)
    with Workspace(root) as space:
        for record in space.branches():  # branches survive the daemon
            space.reopen(record.name).abort()


@pytest.mark.timeout(600)  # sixteen commands, one after another
def test_every_command_reports_that_the_daemon_has_exited(root: Path, real: Mounted) -> None:
    with Workspace(root) as space, space.branch("kept", on_success=None):
        pass
    os.kill(daemon_of(root), signal.SIGKILL)
    await_dead(root)
    where = ["-w", str(root)]
    for words in (
        ["ls", *where],
        ["diff", "kept", *where],
        ["commit", "kept", *where],
        ["log", *where],
        ["status", *where],
        ["undo", *where],
        ["redo", *where],
        ["history", *where],
        ["prune", *where],
        ["abort", "kept", *where],
        ["export", "kept", *where],
        ["load", "new", "/dev/null", *where],
        ["fork", *where, "-c", "true"],
        ["shell", *where, "kept"],
        ["run", *where, "true"],
        ["speculate", *where, "-c", "true"],
    ):
        done = branching(root.parent, *words)
        assert (done.code, done.out) == (125, ""), (words, done)
        assert "error: the BranchFS daemon of" in done.err, (words, done)
        assert "is gone" in done.err, (words, done)
        assert done.err.count("\n") == 2, (words, done)  # one sentence, and one of what to do
    subprocess.run(["umount", "-l", str(root)], check=True)
    subprocess.run([find_program(), "mount", "--base", str(real.base), str(root)], check=True)
    with Workspace(root) as space:
        space.reopen("kept").abort()


def test_a_daemon_that_dies_leaves_no_mount(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On demand: the dead mount goes too."""
    monkeypatch.setenv("BRANCHFS", find_program())
    base = place / "base"
    base.mkdir()
    with Workspace.open(base) as space:
        os.kill(daemon_of(space.path), signal.SIGKILL)
    assert space.path.name.startswith(PREFIX)
    assert space.path not in [mount.directory for mount in read_mounts()]
    assert not space.path.exists()


def test_a_full_disk_in_the_middle(place: Path) -> None:
    base = place / "small"
    base.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(base)], check=True)
    try:
        (base / NAME_FROM).write_text("seed\n")
        with mounted(base, place / "mount") as root:
            script = "head -c 4000000 /dev/zero > big || exit 9"
            done = branching(root, "speculate", "-c", script)
            assert done.code == 1
            assert "No space left on device" in done.err
            assert names(root) == [NAME_FROM]
            with Workspace(root) as space:
                assert space.branches() == []
            done = branching(root, "run", "touch", "made")
            assert (done.code, names(root)) == (0, ["made", NAME_FROM])
    finally:
        subprocess.run(["umount", str(base)], check=True)


def test_a_workspace_cannot_be_mounted_inside_itself(root: Path, real: Mounted) -> None:
    with pytest.raises(MountError):
        Workspace.mount(root, branchfs_bin=find_program())
    with pytest.raises(MountError):
        Workspace.mount(real.base, mountpoint=real.base / "inside", branchfs_bin=find_program())
    (real.base / "inside").rmdir()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["best-of-n", "-n", "1", "--", "sh", "-c", "echo nan >&3"], "finite number"),
        (["best-of-n", "-n", "1", "--", "sh", "-c", "echo inf >&3"], "finite number"),
        (["best-of-n", "-n", "1", "--judge", "echo x", "true"], "wrote no number"),
        (["best-of-n", "-n", "1", "--judge", "echo nan", "true"], "finite number"),
        (["tournament", "-n", "2", "--judge", "echo c", "true"], "must be `a` or `b`, not 'c'"),
        (["speculate", "--setup", "exit 3", "-c", "true"], "the setup failed"),
    ],
    ids=" ".join,
)
def test_a_bad_score_or_answer_commits_nothing(root: Path, words: list[str], text: str) -> None:
    done = branching(root, *words)
    assert done.code in (1, 125)
    assert text in done.err + done.out
    assert "Traceback" not in done.err
