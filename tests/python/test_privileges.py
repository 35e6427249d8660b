"""Commits of set-user-ID files and files with capabilities are carried out with a warning."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import Mounted
from support.command import branching

from branching import Workspace

WARNING = "warning: the commit has 'bin/tool' with {}: users who execute it get rights of its owner"
MAKE = "mkdir -p bin; cp /bin/true bin/tool; chmod {} bin/tool"
RACES = [["speculate", "-c"], ["tournament", "--judge", "echo a", "-c"]]


@pytest.mark.parametrize(
    ("mode", "privileges"),
    [("4755", "set-user-ID"), ("2755", "set-group-ID"), ("6711", "set-user-ID and set-group-ID")],
)
def test_run_warns_of_files_that_give_rights(real: Mounted, mode: str, privileges: str) -> None:
    words = ["run", "-q", "-w", str(real.root), "--", "sh", "-c", MAKE.format(mode)]
    done = branching(real.base.parent, *words)
    assert done.code == 0
    assert WARNING.format(privileges) in done.err
    assert oct((real.base / "bin" / "tool").stat().st_mode)[-4:] == mode


@pytest.mark.parametrize(
    "make",
    [
        MAKE.format("755"), MAKE.format("2644"), "mkdir d; chmod g+s d", "ln -s /usr/bin/su link",
        "rm -f old",
    ],
    ids=["an ordinary file", "one that cannot be executed", "a directory", "a link", "a deletion"],
)  # fmt: skip
def test_other_changes_are_not_warned_of(real: Mounted, make: str) -> None:
    (real.base / "old").touch()
    (real.base / "old").chmod(0o4755)
    done = branching(real.base.parent, "run", "-w", str(real.root), "--", "sh", "-c", make)
    assert done.code == 0
    assert "warning" not in done.err


@pytest.mark.parametrize("words", RACES, ids=lambda words: words[0])
def test_races_warn_of_what_they_commit(real: Mounted, words: list[str]) -> None:
    script = MAKE.format("u+s")
    done = branching(real.base.parent, *words, script, "-w", str(real.root), "--json")
    document = json.loads(done.out)
    assert document["committed"]
    assert [each.partition(":")[0] for each in document["warnings"]] == ["warning"]
    marked = [each["path"] for each in document["changes"] if "privileges" in each]
    assert marked == ["bin/tool"]


@pytest.mark.parametrize("more", [[], ["--select", "bin"]], ids=["all", "a part"])
def test_a_fork_warns_of_what_it_merges(real: Mounted, more: list[str]) -> None:
    """A part is copied on top of the parent's branch, which is committed then."""
    words = ["fork", "-w", str(real.root), *more, "-c", MAKE.format("u+s") + "; : >other"]
    done = branching(real.base.parent, *words)
    assert done.code == 0
    assert (WARNING.format("set-user-ID") in done.err, "warning" in done.out) == (True, False)
    (real.base / "bin" / "tool").unlink()
    done = branching(real.base.parent, *words, "--json")
    assert [each.partition(":")[0] for each in done.document["warnings"]] == ["warning"]


def test_a_commit_and_its_dry_run_warn_once_for_each_file(real: Mounted) -> None:
    script = "for n in $(seq 12); do : >$n; chmod 4755 $n; done; : >plain"
    words = ["-w", str(real.root)]
    kept = branching(
        real.base.parent, "run", "-b", "b", "--on-success", "keep", *words, "--", "sh", "-c", script
    )
    assert kept.code == 0
    assert "warning" not in kept.err
    for more in (["--dry-run"], []):
        done = branching(real.base.parent, "commit", "b", *words, *more)
        warnings = [line for line in done.err.splitlines() if line.startswith("warning")]
        assert len(warnings) == 11
        assert warnings[-1] == "warning: 2 more files with such rights"


def test_changes_say_which_rights(real_workspace: Workspace) -> None:
    with real_workspace.branch("b", on_success=None) as branch:
        (branch.path / "capable").touch(0o755)
        attribute = b"\x01\0\0\x02" + b"\0\x20" + bytes(14)  # cap_net_raw=p
        os.setxattr(branch.path / "capable", "security.capability", attribute)
        (branch.path / "plain").touch()
        with branch.branch("below") as below:
            (below.path / "tool").touch()
            (below.path / "tool").chmod(0o4755)
        changes = branch.commit()
    found = {change.path: change.privileges for change in changes}
    assert found == {"capable": ("capabilities",), "plain": (), "tool": ("set-user-ID",)}
    assert Path(real_workspace.base / "tool").stat().st_mode & 0o4000
