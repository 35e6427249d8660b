"""Names that the host, the engine and the image share."""

from __future__ import annotations

TYPE_CHECKING = False  # see docker_context
if TYPE_CHECKING:
    from collections.abc import Mapping

WORKSPACE_LABEL = "branching.workspace"
"""A label on every container of the wrapper: the directory it works on."""
DIRECTORY_LABEL = "branching.directory"
"""A label on the same containers: identifies the directory, as another one may have its path later."""
WARM_LABEL = "branching.warm"
"""A label on a warm container: the settings it was started with, as JSON."""
FINGERPRINT_LABEL = "branching.stamp"
"""A label on a warm container that has all settings of the configuration files: their fingerprint."""
STAGE_LABEL = "branching.stage"
NAME_LABEL = "branching.name"
"""Labels on the stages of a build: the stage, and the image's name, so that only its own old images are removed."""
VERSION_LABEL = "org.opencontainers.image.version"
BASE_IN_CONTAINER = "/src"
STORE_IN_CONTAINER = "/store"
"""Where volumes with branches are mounted, each under its name."""
STORE_LINK = ".branching/store"
"""In a directory whose branches are in a volume: a link to them, by the container's path, while there are any."""
STORE_VARIABLE = "BRANCHING_STORE"
"""Tells the image's entry point where branches are kept, if not in the directory."""
STORE_AUTO = "auto"
WARM_WORD = "--warm"
"""The entry point's argument for a warm container; the seconds it may be idle follow."""
RECOVER_WORD = "--recover"
"""The entry point's argument for settling an interrupted commit without mounting."""
PROBE_WORD = "--probe"
"""The entry point's argument for a report about the container as JSON."""
EXEC_PROGRAM = "branching-exec-command"
"""The program in the image that runs a command in a warm container, and signals it by its token."""
READY = "ready\n"
"""The line that a warm container prints when commands can run in it."""
SETTINGS_FILE = "branching-docker.toml"
ROOT_VARIABLE = "BRANCHING_ROOT"
HOST_VARIABLE = "BRANCHING_HOST_WORKSPACE"
"""Tells the container the directory's path on the host, which clients use."""
COMMAND_VARIABLE = "BRANCHING_COMMAND_NAME"
"""Tells the container how commands start on the host, so that suggested commands can be typed there."""
START_VARIABLE = "BRANCHING_START_DIRECTORY"
"""Tells the container where in the directory the caller is, relative to it."""
INNER_SETTINGS_VARIABLE = "BRANCHING_SETTINGS"
"""Passes the user's settings file of `branching` to the container."""
INNER_SETTINGS_CHARACTERS_MAX = 65536
EXEC = "exec"
RECOVER = "recover"
JOURNAL = ".branching/journal"
"""In a directory: empty unless a commit is running or was interrupted."""
OWN_COMMANDS = ("up", EXEC, "down", RECOVER, "init", "build", "pull", "doctor", "completion")
"""The wrapper's own commands. All others are passed through to `branching`."""
PLAIN_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")
"""Characters that a shell does not interpret. `shlex` knows them too, but is slow to import."""


def command_name(workspace: str) -> str:
    """Returns the start of a command line for the directory, quoted for a shell."""
    is_plain = workspace and PLAIN_CHARACTERS.issuperset(workspace)
    quoted = workspace if is_plain else "'" + workspace.replace("'", "'\"'\"'") + "'"
    return f"branching-docker -w {quoted}"


def inner_settings_path(environ: Mapping[str, str]) -> str:
    """Returns the path of the user's settings file of `branching`, which may be missing or is ignored."""
    if environ.get("BRANCHING_NO_CONFIG"):
        return ""
    configured = environ.get("XDG_CONFIG_HOME") or environ.get("HOME", "") + "/.config"
    return configured + "/branching/config.toml"
