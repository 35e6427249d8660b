"""What a plan must know of the engine that will carry it out.

Facts are data: those of machines that we do not have are tested by writing them down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MACOS = "darwin"
DESKTOP = "Docker Desktop"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """An engine; by default an ordinary Docker on the machine itself."""

    kind: str = "docker"
    """Whose command it is: "docker" or "podman"."""
    has_selinux: bool = False
    """Whether containers may not see a directory that has no label for them."""
    is_virtual: bool = False
    """Whether it runs in a virtual machine that shares this one's directories: commits there cannot exchange files."""


def docker_facts(info: Mapping[str, Any], *, platform: str) -> EngineFacts:
    """Reads what Docker tells about itself; `platform` is ours, as in `sys.platform`."""
    security = [str(option).removeprefix("name=").split(",")[0] for option in info.get("SecurityOptions") or ()]
    return EngineFacts(
        has_selinux="selinux" in security,
        is_virtual=platform == MACOS or DESKTOP in str(info.get("OperatingSystem", "")),
    )


def podman_facts(*, platform: str, has_selinux: bool) -> EngineFacts:
    """Podman's command does not tell quickly; its machine on macOS is Fedora, which has SELinux."""
    return EngineFacts(kind="podman", has_selinux=has_selinux or platform == MACOS, is_virtual=platform == MACOS)
