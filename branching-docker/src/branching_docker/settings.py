"""The settings, and the order of their sources.

The first of four sources that sets something wins:

    flag            --network none
    environment     BRANCHING_NETWORK=none
    project         branching-docker.toml in the directory given by -w
    user            branching-docker.toml in the user's configuration directory

Lists (env, env-file, volume, publish) are concatenated, the strongest source last, as docker uses the last of several.

A project's file often comes from a stranger and is read before anything is isolated. So it can restrict the container
or give it files of the project, and nothing else (`restrict`).
"""

from __future__ import annotations

import difflib
import os
import posixpath
import re
import shlex
import stat
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branching_docker.constants import SETTINGS_FILE
from branching_docker.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_BYTES_MAX = 1 << 20
VARIABLE_PREFIX = "BRANCHING_"
IMAGE_DEFAULT = "branching"
DRIVERS = ("auto", "fuse", "overlay")
POLICIES = ("first-winner", "snapshot", "serializable")
ENGINES = ("docker", "podman")
PULLS = ("always", "missing", "never")
CHOICES = {"driver": DRIVERS, "policy": POLICIES, "engine": ENGINES, "pull": PULLS}
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")
# Docker checks these too, but does not say which source has the wrong one. None may look like an option of docker's.
SHAPES = {
    "image": (re.compile(r"[a-zA-Z0-9]\S*"), "an image's name, as docker image ls shows it"),
    "name": (re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*"), "letters, digits, and _ . - after the first"),
    "memory": (re.compile(r"[0-9]+(\.[0-9]+)?[bkmgt]?b?", re.IGNORECASE), "write 512m or 2g"),
    "cpus": (re.compile(r"[0-9]+(\.[0-9]+)?|\.[0-9]+"), "write 2 or 0.5"),
    "pids_limit": (re.compile(r"-1|[0-9]+"), "write 500"),
    **dict.fromkeys(("network", "user", "store", "platform"), (re.compile(r"[^\s-]\S*"), "write a name")),
}
NOT_FOR_PROJECTS = ("store", "user", "root", "pull", "publish", "engine", "name", "env_file")
# Root's programs in the container read these before a command is isolated: those that sudo removes, and our own.
NOT_FOR_PROJECTS_ENV = re.compile(
    r"(LD_|PYTHON|BASH|GIT_|BRANCH|RUST|GLIBC_|MALLOC_|DOCKER_).*"
    r"|PATH|ENV|IFS|CDPATH|SHELLOPTS|PS[0-9]|HOME|TMPDIR|LOCPATH|NLSPATH|GCONV_PATH|OPENSSL_.*|SSL_.*"
)
# Directories of the image's programs and their files, and our mounts.
NOT_FOR_PROJECTS_PLACES = re.compile(
    r"/((bin|boot|dev|etc|lib.*|opt|proc|root|run|sbin|src|store|sys|usr|var|workspace)(/.*)?)?"
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, named as the flags, with `_` for `-`."""

    image: str = IMAGE_DEFAULT
    engine: str | None = None
    driver: str = "auto"
    policy: str = "first-winner"
    network: str | None = None
    env: tuple[str, ...] = ()
    env_file: tuple[str, ...] = ()
    volume: tuple[str, ...] = ()
    publish: tuple[str, ...] = ()
    store: str | None = None
    user: str | None = None
    root: bool = False
    memory: str | None = None
    cpus: str | None = None
    pids_limit: str | None = None
    pull: str = "never"
    platform: str | None = None
    name: str | None = None
    idle: str = "30m"


NAMES = tuple(field.name for field in fields(Settings))
LISTS = tuple(field.name for field in fields(Settings) if field.default == ())
Source = dict[str, Any]


def gather(flags: Source, *, environ: Mapping[str, str], workspace: Path | None) -> Settings:
    """Returns the settings for a workspace. A flag that is None was not given.

    Raises:
        SettingsError: a source cannot be read, or has a wrong setting; the message names it.
    """
    sources = [from_file(user_file(environ), is_project=False)]
    if workspace is not None:
        sources.append(from_file(workspace / SETTINGS_FILE, is_project=True))
    sources += [
        from_environment(environ),
        validate({name: given for name, given in flags.items() if given is not None}, "the command line"),
    ]
    return merge(sources)


def merge(sources: list[Source]) -> Settings:
    """Merges the settings of several sources, the strongest last."""
    merged: Source = {}
    for source in sources:
        for name, value in source.items():
            merged[name] = (*merged.get(name, ()), *value) if name in LISTS else value
    return Settings(**merged)


def user_file(environ: Mapping[str, str]) -> Path | None:
    """Returns the path of the user's own file, which may be missing."""
    if configured := environ.get("XDG_CONFIG_HOME"):
        return Path(configured) / SETTINGS_FILE
    home = environ.get("HOME")
    return Path(home) / ".config" / SETTINGS_FILE if home else None


def from_environment(environ: Mapping[str, str]) -> Source:
    """Reads variables such as BRANCHING_IMAGE; an empty one is ignored. Lists have no variable."""
    found = {name: environ.get(VARIABLE_PREFIX + name.upper()) for name in NAMES if name not in LISTS}
    given: Source = {name: value for name, value in found.items() if value}
    if "root" in given:
        given["root"] = parse_bool(given["root"])
    return validate(given, "the environment")


def parse_bool(word: str) -> bool:
    """Returns the meaning of a yes or no."""
    if word.lower() in TRUE + FALSE:
        return word.lower() in TRUE
    raise SettingsError(f"BRANCHING_ROOT={word} is neither yes nor no.", hint="write 1 or 0")


def from_file(path: Path | None, *, is_project: bool) -> Source:
    """Reads a configuration file; a missing one is empty."""
    if path is None:
        return {}
    try:
        # Opening a pipe in a stranger's project must not block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise SettingsError(
                    f"{path} is not a configuration file: it is not a regular file.", hint="move it away"
                )
            content = file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read.", cause=error.strerror, hint=f"ls -l {shlex.quote(str(path))}"
        ) from error
    if len(content) > FILE_BYTES_MAX:
        raise SettingsError(f"{path} is not a configuration file: it is too large.", hint="move it away")
    given = {key.replace("-", "_"): value for key, value in parse_toml(content, path).items()}
    if isinstance(given.get("env"), dict):
        given["env"] = [assignment(name, value, path) for name, value in given["env"].items()]
    source = validate(given, str(path))
    return restrict(source, path) if is_project else source


def assignment(name: str, value: object, path: Path) -> str:
    """Returns a variable of the table [env] as docker takes it."""
    if not isinstance(value, (str, int, float)):
        raise SettingsError(f"{path}: env {name} is not a string.", hint=f'{name} = "..."')
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def parse_toml(content: bytes, path: Path) -> Source:
    """Parses TOML. The parser is only imported if there is a file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML.", cause=str(error), hint="correct that line") from error


def validate(given: Source, where: str) -> Source:
    """Returns the settings, each of its type and one of its choices."""
    source: Source = {}
    for name, value in given.items():
        spelled = name.replace("_", "-")
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            meant = near[0].replace("_", "-") if near else ""
            hint = f"did you mean {meant}?" if near else "branching-docker --help lists the settings"
            raise SettingsError(f'{where}: there is no setting "{spelled}".', hint=hint)
        if name in LISTS:
            if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
                raise SettingsError(f"{where}: {spelled} is not a list of strings.", hint=f'{spelled} = ["..."]')
            value = tuple(value)
        elif name == "root":
            if not isinstance(value, bool):
                raise SettingsError(f"{where}: {spelled} is neither true nor false.", hint=f"{spelled} = true")
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)) or value == "":
            raise SettingsError(f"{where}: {spelled} is not a string.", hint=f'{spelled} = "..."')
        else:
            value = str(value)
        if name in CHOICES and value not in CHOICES[name]:
            allowed = ", ".join(CHOICES[name])
            raise SettingsError(f'{where}: {spelled} cannot be "{value}".', hint=f"choose one of: {allowed}")
        if name in SHAPES and not SHAPES[name][0].fullmatch(value):
            raise SettingsError(f'{where}: {spelled} cannot be "{value}".', hint=SHAPES[name][1])
        for word in value if name == "env" else ():
            if word.startswith("=") or not word:
                raise SettingsError(f'{where}: env "{word}" has no name.', hint='env = ["NAME=VALUE"]')
        source[name] = value
    if "idle" in source:
        idle_seconds(source["idle"], where)
    return source


def idle_seconds(text: str, where: str = "the command line") -> int:
    """Reads 90, 90s, 5m, 2h as seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    if not (number.isascii() and number.isdigit() and int(number) > 0):
        raise SettingsError(f'{where}: "{text}" is not an idle time.', hint="write 90, 90s, 5m or 2h")
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def restrict(source: Source, path: Path) -> Source:
    """Returns a project's settings with absolute paths.

    Raises:
        SettingsError: a setting would give the project access to other files or services of this machine.
    """

    def refuse(what: str) -> SettingsError:
        return SettingsError(
            f"{path}: a project may not set {what}.", hint="give it as a flag, or in your own configuration file"
        )

    for name in NOT_FOR_PROJECTS:
        if name in source:
            raise refuse(name.replace("_", "-"))
    if source.get("network", "none") not in ("none", "bridge", "default"):
        raise refuse(f'the network "{source["network"]}"')
    for assignment in source.get("env", ()):
        if "=" not in assignment:
            raise refuse(f"env {assignment} without a value: it would pass on yours")
        if NOT_FOR_PROJECTS_ENV.fullmatch(assignment.partition("=")[0]):
            raise refuse(f"env {assignment.partition('=')[0]}: the image's own programs read it")
    root = path.parent.resolve()

    def inside(volume: str) -> str:
        place, colon, rest = volume.partition(":")
        real = (root / place).resolve()
        if not colon or (real != root and root not in real.parents):
            raise refuse(f"the volume {volume}: its directory is not one of the project's (./name:/place)")
        inner, _, options = rest.partition(":")
        if NOT_FOR_PROJECTS_PLACES.fullmatch("/" + posixpath.normpath(inner).lstrip("/")):
            raise refuse(f"the volume {volume}: the image's own programs are there (./name:/mnt/place)")
        if options not in ("", "ro", "rw"):
            raise refuse(f"the volume {volume} with options other than ro and rw")
        return f"{real}:{rest}"

    if "volume" in source:
        if any(not volume.startswith(("./", "/")) for volume in source["volume"]):
            raise refuse("named volumes: they may be another project's")
        source["volume"] = tuple(inside(volume) for volume in source["volume"])
    return source
