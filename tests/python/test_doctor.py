"""`branching doctor`: each line is ok, or says what to do."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.branchfs import find_program
from support.command import branching

from branching.cli import doctor
from branching.cli.doctor import Finding, examine


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFS", find_program())


def named(name: str) -> Finding:
    [found] = [finding for finding in examine() if finding.name == name]
    return found


def test_doctor_finds_nothing_missing_on_a_test_machine(place: Path) -> None:
    """The fixtures look for what it may leave behind."""
    done = branching(place, "doctor")
    assert done.code == 0, done.out
    words = [line.split()[0] for line in done.out.splitlines() if not line.startswith(" ")]
    assert set(words) <= {"ok", "limited"}
    assert "ok       mount: a directory was mounted, branched, committed and undone" in done.out


def test_its_document(place: Path) -> None:
    facts = branching(place, "doctor", "--json").document
    assert facts["ok"] is True
    assert {"name", "state", "detail", "hint"} == set(facts["checks"][0])


def test_doctor_names_a_missing_program_and_how_to_install_it(place: Path) -> None:
    done = branching(place, "doctor", BRANCHFS="/no/such/branchfs")
    assert done.code == 1
    assert "missing  branchfs: there is no program '/no/such/branchfs'" in done.out
    assert "Hint: cargo install --path branchfs" in done.out


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "FUSE", tmp_path / "fuse")
    assert (named("/dev/fuse").state, "modprobe" in named("/dev/fuse").hint) == ("missing", True)


def test_a_kernel_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "4.19.0-27-amd64")
    assert named("kernel").detail == "4.19.0-27-amd64 is too old"


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.12.9-amd64", (6, 12)),
        ("5.9-rc3", (5, 9)),
        ("5.10.0", (5, 10)),
        ("6", (6, 0)),
        ("6.1-rc3+", (6, 1)),
        ("unknown", (0, 0)),
    ],
)
def test_the_version_of_a_kernel_is_read(release: str, version: tuple[int, int]) -> None:
    assert doctor.kernel_version(release) == version


def test_a_device_without_access_names_the_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    found = doctor._find("/dev/fuse", "missing", doctor._fuse)
    assert (found.state, "read and write access" in found.hint) == ("missing", True)


def test_a_mount_that_fails_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHFS", shutil.which("false") or sys.exit("no false"))
    assert named("mount").state == "missing"
    assert "mount failed" in named("mount").detail


def test_an_ordinary_user_needs_fusermount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    assert doctor._find("fusermount3", "missing", doctor._fusermount) == Finding(
        name="fusermount3",
        state="missing",
        detail="it is not installed; only root can mount",
        hint="sudo apt install fuse3",
    )
