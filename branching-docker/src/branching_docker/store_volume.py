"""The store of a directory's branches: in the directory itself, or in a volume.

A volume has one subdirectory for each directory, named after a digest of its path. While there are branches, and after
a container was killed, the directory has a link to it, by the container's path:

    DIR/.branching/store -> /store/VOLUME/DIGEST

A command that names no volume uses that one. The directory, and the link in it, may come from a stranger. So the link
is only followed to a volume that the wrapper itself created.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from branching_docker.constants import STORE_AUTO, STORE_IN_CONTAINER, STORE_LINK, WORKSPACE_LABEL

if TYPE_CHECKING:
    from pathlib import Path

    from branching_docker.engine import Engine
    from branching_docker.engine_info import EngineInfo
    from branching_docker.settings import Settings

VOLUME_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")


def digest(workspace: Path) -> str:
    """Returns a short name for a directory."""
    return hashlib.sha256(os.fsencode(workspace)).hexdigest()[:12]


def store_volume(workspace: Path, settings: Settings, info: EngineInfo) -> str | None:
    """Returns the volume that holds the directory's branches, None where they are in the directory itself."""
    if settings.store in (None, STORE_AUTO):
        is_wanted = info.is_virtual or settings.store == STORE_AUTO
        return f"branching-store-{digest(workspace)}" if is_wanted else None
    return settings.store


def linked_volume(workspace: Path) -> str | None:
    """Returns the volume that the directory's link names; None without a link of the form above."""
    try:
        place = os.readlink(workspace / STORE_LINK)  # noqa: PTH115
    except OSError:
        return None
    volume = place.removeprefix(f"{STORE_IN_CONTAINER}/").removesuffix(f"/{digest(workspace)}")
    is_whole = place == f"{STORE_IN_CONTAINER}/{volume}/{digest(workspace)}"
    return volume if is_whole and VOLUME_NAME.fullmatch(volume) else None


def resolve_store(settings: Settings, workspace: Path, engine: Engine, info: EngineInfo) -> Settings:
    """Returns the settings, with the volume of the directory's link if they name no other."""
    volume = linked_volume(workspace) if settings.store is None else None
    if volume is None or volume == store_volume(workspace, settings, info):
        return settings
    labels = engine.volume_labels(volume)
    return replace(settings, store=volume) if labels and WORKSPACE_LABEL in labels else settings
