"""Hints of a command whose user cannot mount. The command runs as that user."""

from __future__ import annotations

import os

import pytest
from support.ordinary_user import AS_STRANGER, IN_NAMESPACE, run_python

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing the user needs root")


def command_as(how: str, fuse_mode: str) -> tuple[int, str]:
    """Runs `branching run` with a /dev/fuse of this mode; returns exit code and standard error."""
    done = run_python(["-m", "branching", "run", "--", "true"], how=how, fuse_mode=fuse_mode)
    return done.returncode, done.stderr


@pytest.mark.parametrize("how", [AS_STRANGER, f"{AS_STRANGER} {IN_NAMESPACE} --mount"])
def test_a_device_that_may_not_be_opened_is_a_matter_of_permissions(how: str) -> None:
    """The module is loaded, so modprobe would change nothing. Root in a namespace mounts itself."""
    code, text = command_as(how, "600")
    assert (code, "/dev/fuse" in text, "Permission denied" in text) == (125, True, True), text
    assert "run as root, or give this user read and write access to" in text
    assert "modprobe" not in text


def test_a_user_without_an_entry_needs_one_and_no_package() -> None:
    code, text = command_as(AS_STRANGER, "666")
    assert code == 125, text
    assert "mounts only for users with an entry in /etc/passwd: add one, or mount as root" in text
    assert "fuse3 " not in text
    assert "install" not in text


def test_in_a_user_namespace_no_hint_says_to_remove_roots_directory() -> None:
    """It belongs to root outside, so it cannot be removed. The mount is what is refused."""
    code, text = command_as(f"{AS_STRANGER} {IN_NAMESPACE}", "666")
    assert (code, "is not permitted" in text) == (125, True), text
    assert "/run/branchfs" not in text
    assert "remove" not in text


def test_in_a_user_namespace_with_mounts_of_its_own_it_runs() -> None:
    code, text = command_as(f"{AS_STRANGER} {IN_NAMESPACE} --mount", "666")
    assert (code, "✓ nothing to commit" in text) == (0, True), text
