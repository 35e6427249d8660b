"""The user's settings file, with defaults of options: `$XDG_CONFIG_HOME/branching/config.toml`.

    timeout = "10m"                 for every command with an option --timeout
    hide = ["**/.env"]              a list, for an option that can be repeated
    no-network = true
    [best-of-n]                     for this command alone
    n = 5

A key is the name of an option without its dashes. An option on the command line replaces the value
of the file, and so does the table of a command. A flag cannot be unset on the command line:
`BRANCHING_NO_CONFIG=1` makes a command ignore the file. Python 3.10 has no parser for TOML: the
extra `cli` brings one there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branching.cli.error_handling import UsageFault

if TYPE_CHECKING:
    import typer

TEXT_VARIABLE = "BRANCHING_SETTINGS"
"""In a container: the content of the user's file on the host, which the wrapper passes on."""
IGNORE_VARIABLE = "BRANCHING_NO_CONFIG"
"""Set to anything but an empty text: the user's file is ignored."""
_FILE_BYTES_MAX = 1 << 20


def settings_path() -> Path | None:
    """Returns the path of the user's settings file, which may be missing.

    None without a home, or with `BRANCHING_NO_CONFIG`.
    """
    if os.environ.get(IGNORE_VARIABLE):
        return None
    configured = os.environ.get("XDG_CONFIG_HOME")
    home = os.environ.get("HOME")
    if not configured and not home:
        return None
    directory = Path(configured) if configured else Path(str(home)) / ".config"
    return directory / "branching" / "config.toml"


def apply_settings(context: typer.Context) -> None:
    """Makes the settings the defaults of the options of the command that is run.

    Args:
        context: The context of the command group.

    Raises:
        UsageFault: The file cannot be read, or has a setting that no command takes.
    """
    path, text = read_settings()
    if not text:
        return
    try:
        given = _parse(text)
        context.default_map = _defaults(context, given)
    except UsageFault as fault:
        raise UsageFault(f"{path}: {fault}") from fault


def read_settings() -> tuple[str, str]:
    """Returns the name of the file, and its content, empty if it is missing.

    Raises:
        UsageFault: The file cannot be read.
    """
    path = settings_path()
    if text := os.environ.get(TEXT_VARIABLE):
        return "the settings file", text
    if path is None:
        return "", ""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise UsageFault(f"{path}: the settings file is larger than {_FILE_BYTES_MAX} bytes")
        return str(path), content.decode()
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFault(f"{path}: the settings file cannot be read: {error}") from error


def has_settings() -> bool:
    """Returns whether there are settings, or a file that cannot be read."""
    try:
        return read_settings()[1] != ""
    except UsageFault:
        return True  # `apply_settings` reports it


def _parse(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        parsed: dict[str, Any] = tomllib.loads(text)
        return parsed
    except tomllib.TOMLDecodeError as error:
        raise UsageFault(f"the settings file is not TOML: {error}") from error


def _defaults(context: typer.Context, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults by command and parameter, and checks all settings."""
    commands: dict[str, Any] = context.command.commands  # type: ignore[attr-defined]
    options = {
        name: {
            option.lstrip("-"): each
            for each in [*command.params, *context.command.params]
            for option in each.opts
            if each.param_type_name == "option"
        }
        for name, command in commands.items()
    }
    defaults: dict[str, Any] = {name: {} for name in commands}
    ours: set[str | None] = {each.name for each in context.command.params}
    tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    for key, value in given.items():
        if key in tables:
            continue
        takers = [name for name in commands if key in options[name]]
        if not takers:
            raise UsageFault(f"there is no option --{key}")
        for name in takers:
            _set(context, defaults, name, options[name][key], key, value, ours)
    for name, table in tables.items():
        if name not in commands:
            raise UsageFault(f"there is no command {name}")
        for key, value in table.items():
            if key not in options[name] or options[name][key].name in ours:
                raise UsageFault(f"{name} has no option --{key}")
            _set(context, defaults, name, options[name][key], key, value, ours)
    return defaults


def _set(
    context: typer.Context,
    defaults: dict[str, Any],
    command: str,
    option: Any,
    key: str,
    value: object,
    ours: set[str | None],
) -> None:
    """Sets the default of an option, which may be one of the command group."""
    is_list = isinstance(value, list)
    words = value if isinstance(value, list) else [value]
    if not all(isinstance(word, (str, int, float)) for word in words) or is_list != option.multiple:
        kind = "a list of strings" if option.multiple else "a single value"
        raise UsageFault(f"{key} = {value!r}: expected {kind}")
    if option.is_flag != isinstance(value, bool):
        raise UsageFault(
            f"{key} = {value!r}: expected {'true or false' if option.is_flag else 'text'}"
        )
    from typer import BadParameter

    text = value if option.is_flag else [str(word) for word in words] if is_list else str(value)
    try:
        processed = option.process_value(context, text)
    except BadParameter as error:
        raise UsageFault(f"{key} = {value!r}: {error.format_message()}") from error
    if option.name not in ours:
        defaults[command][option.name] = text
    elif context.params.get(option.name) is None:
        context.params[option.name] = processed
