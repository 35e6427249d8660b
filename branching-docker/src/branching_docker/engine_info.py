"""What a plan must know about the engine that will run it.

The values are plain data, so engines that a test machine lacks are tested by writing theirs down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

MACOS = "darwin"
DESKTOP = "Docker Desktop"


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine; by default an ordinary Docker on the machine itself."""

    kind: str = "docker"
    """Whose command it is: "docker" or "podman"."""
    has_selinux: bool = False
    """Whether SELinux hides a directory without a label from containers."""
    is_virtual: bool = False
    """Whether it runs in a virtual machine that shares this one's directories: commits there cannot exchange files."""


def security_options(info: Mapping[str, Any]) -> list[str]:
    """Returns the names of Docker's security options, such as apparmor, rootless, selinux and userns."""
    return [str(option).removeprefix("name=").split(",")[0] for option in info.get("SecurityOptions") or ()]


def docker_info(info: Mapping[str, Any], *, platform: str) -> EngineInfo:
    """Reads Docker's answer to `docker info`; `platform` is ours, as in `sys.platform`."""
    return EngineInfo(
        has_selinux="selinux" in security_options(info),
        is_virtual=platform == MACOS or DESKTOP in str(info.get("OperatingSystem", "")),
    )


def podman_info(*, platform: str, has_selinux: bool) -> EngineInfo:
    """Judges by the platform, since `podman info` is slow. On macOS Podman runs in Fedora, which has SELinux."""
    return EngineInfo(kind="podman", has_selinux=has_selinux or platform == MACOS, is_virtual=platform == MACOS)
