"""IPython in an interpreter of a session. The kernel calls these functions there.

What a cell displays is collected and returned, as plain data: the kernel publishes it. Text that is
printed arrives as output of the session, while the cell runs.
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.completer import provisionalcompleter, rectify_completions
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor
from traitlets.config import Config

COMPLETIONS_MAX = 1000


class _Results(DisplayHook):
    """Collects the values of expressions."""

    def write_output_prompt(self) -> None:
        """The front end shows the number of the cell."""

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        """Collects a value as the front end gets it."""
        self.shell.outputs.append(("result", dict(format_dict), dict(md_dict or {}), {}))


class _Displays(DisplayPublisher):
    """Collects what `display` shows."""

    def publish(
        self,
        data: Any,
        metadata: Any = None,
        *,
        transient: Any = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Collects one item."""
        kind = "update" if update else "display"
        self.shell.outputs.append((kind, dict(data), dict(metadata or {}), dict(transient or {})))

    def clear_output(self, wait: bool = False) -> None:
        """Collects the request to clear what was shown."""
        self.shell.outputs.append(("clear", {}, {"wait": wait}, {}))


class _Shell(InteractiveShell):
    outputs: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]
    error: tuple[str, str, list[str]] | None

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        """Collects an exception that a cell has raised."""
        self.error = (str(getattr(etype, "__name__", etype)), str(evalue), list(stb))


def start(commands: list[str]) -> None:
    """Makes the shell of this interpreter.

    Args:
        commands: Names of the kernel's own commands, which cannot stand within a cell.
    """
    config = Config()
    config.HistoryManager.enabled = False  # it has a thread and a database in the home directory
    config.IPCompleter.use_jedi = False  # the values are here: no source needs to be analysed
    shell = _Shell.instance(
        config=config,
        ipython_dir="/tmp/ipython",  # the sandbox's own
        user_module=sys.modules["__main__"],
        displayhook_class=_Results,
        display_pub_class=_Displays,
    )

    def misplaced(_: str) -> None:
        raise RuntimeError("commands of the kernel must come before all code of a cell")

    for name in commands:
        shell.register_magic_function(misplaced, "line", name)


def execute(
    code: str, count: int, *, silent: bool, store_history: bool, expressions: dict[str, str]
) -> dict[str, Any]:
    """Executes a cell with the number `count`; returns what it displayed and raised."""
    shell = _shell()
    shell.outputs, shell.error = [], None
    shell.execution_count = count
    shell.run_cell(code, store_history=store_history, silent=silent)
    values = {} if shell.error else shell.user_expressions(expressions)
    payload = shell.payload_manager.read_payload()
    shell.payload_manager.clear_payload()
    return {
        "outputs": shell.outputs,
        "error": shell.error,
        "payload": payload,
        "user_expressions": values,
    }


def complete(code: str, position: int) -> dict[str, Any]:
    """Returns the completions at a position of a cell."""
    with provisionalcompleter():
        found = list(rectify_completions(code, _shell().Completer.completions(code, position)))
    return {
        "matches": [each.text for each in found[:COMPLETIONS_MAX]],
        "cursor_start": found[0].start if found else position,
    }


def inspect(code: str, position: int, detail_level: int) -> dict[str, Any] | None:
    """Returns the documentation of the name at a position of a cell; None if there is none."""
    try:
        found: dict[str, Any] = _shell().object_inspect_mime(
            token_at_cursor(code, position), detail_level=detail_level
        )
    except KeyError:
        return None
    return found


def _shell() -> Any:
    return _Shell.instance()
