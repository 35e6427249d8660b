"""Names that the host, the engine and the image agree on."""

from __future__ import annotations

WORKSPACE_LABEL = "branching.workspace"
"""On every container of ours: the directory it works on."""
WARM_LABEL = "branching.warm"
"""On a warm container: the settings it was made with, as JSON."""
STAGE_LABEL = "branching.stage"
VERSION_LABEL = "org.opencontainers.image.version"
BASE_IN_CONTAINER = "/src"
WARM_WORD = "--warm"
"""What the image's entry point takes instead of a command, with the seconds it may be idle."""
PROBE_WORD = "--probe"
"""What it takes to tell about its surroundings."""
ENTER_PROGRAM = "branching-enter"
"""In the image: runs a command in a warm container so that it can be found and ended by its token."""
READY = "ready\n"
"""What a warm container says when commands may come."""
SETTINGS_FILE = "branching-docker.toml"
ROOT_VARIABLE = "BRANCHING_ROOT"
EXEC = "exec"
OURS = ("up", EXEC, "down", "build", "pull", "doctor", "completion")
"""Commands of the wrapper itself. Every other word is `branching`'s affair."""
