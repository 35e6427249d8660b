"""The kernel that Jupyter talks to: ipykernel's protocol in front, a session behind."""

from __future__ import annotations

import codecs
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from branching._threads import run_in_thread
from branching.cli.session_commands import CommandError, SessionCommands, leave
from branching.errors import BranchingError
from branching.session import Cell, Child, Session

try:
    from ipykernel.jsonutil import encode_images, json_clean
    from ipykernel.kernelbase import Kernel
    from IPython.core.inputtransformer2 import TransformerManager
except ImportError as error:
    raise ImportError(
        'the Jupyter kernel needs its extra: pip install ".[jupyter]" in the source tree'
    ) from error

WORKSPACE_VARIABLE = "BRANCHING_KERNEL_WORKSPACE"
"""The directory of the session; by default that in which the kernel starts."""
NUMBER_VARIABLE = "child_index"
"""The variable that tells code in which child it runs."""

_COMMAND = re.compile(r"\s*%(\w+)[ \t]*([^\n]*)(?:\n|\Z)")
_ALL = re.compile(r"\s*%%(all|fork)[ \t]*([^\n]*)(?:\n|\Z)")


class SessionKernel(Kernel):
    """A kernel whose cells run in a session.

    Cells run one after another, each in a thread: the control channel is served meanwhile.
    """

    implementation = "branching"
    implementation_version = "1"
    banner = "Python in a branch. %fork N, %child K, %pick, %back, %diff, %commit"
    language_info = {  # noqa: RUF012  (a trait of the base class)
        "name": "python",
        "version": sys.version.split()[0],
        "mimetype": "text/x-python",
        "codemirror_mode": {"name": "ipython", "version": 3},
        "pygments_lexer": "ipython3",
        "nbconvert_exporter": "python",
        "file_extension": ".py",
    }

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self._commands: SessionCommands | None = None
        self._write: Callable[[str, bytes], None] = self._send_stream
        self._decoders = {
            name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }

    def start(self) -> None:
        """Starts the kernel. A signal must not interrupt a fork: an interrupt is a message."""
        super().start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def pre_handler_hook(self) -> None:
        """Leaves SIGINT ignored."""

    def post_handler_hook(self) -> None:
        """Leaves SIGINT ignored."""

    def _send_interrupt_children(self) -> None:
        if self._commands is not None:
            self._commands.place.interrupt()
            for child in self._commands.session.children:
                child.interrupt()

    # Cells.

    async def do_execute(
        self,
        code: str,
        silent: bool,
        store_history: bool = True,
        user_expressions: dict[str, str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Runs the commands at the head of a cell, and then the rest as code."""
        options = {
            "silent": silent,
            "store_history": store_history,
            "expressions": user_expressions or {},
        }
        return await run_in_thread(lambda: self._reply(code, options))

    def _reply(self, code: str, options: dict[str, Any]) -> dict[str, Any]:
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always", UserWarning)
                try:
                    return self._run_cell(code, options)
                finally:
                    for warning in found:
                        self._print(f"warning: {warning.message}\n", "stderr")
        except CommandError as error:
            return self._failed("UsageError", str(error), [str(error)])
        except BranchingError as error:
            lines = [error.message, *(f"  {path}" for path in error.paths)]
            lines += [f"Hint: {error.hint}"] if error.hint else []
            return self._failed(type(error).__name__, error.message, lines)

    def _run_cell(self, code: str, options: dict[str, Any]) -> dict[str, Any]:
        commands = self._started()
        if match := _ALL.match(code):
            if match[1] == "fork":
                self._run_command(commands, "fork", match[2].strip())
            elif match[2].strip():
                raise CommandError("the code for all children begins on the line after %%all")
            return self._run_in_all(commands, code[match.end() :], options)
        while (match := _COMMAND.match(code)) and match[1] in commands.table:
            self._run_command(commands, match[1], match[2].strip())
            code = code[match.end() :]
        if not code.strip():
            return self._succeeded({})
        return self._published(self._run(commands.place, code, options))

    def _run_command(self, commands: SessionCommands, name: str, argument: str) -> None:
        if text := commands.table[name](argument):
            self._print(f"{text}\n")
        if name == "fork":
            for child in commands.session.children:
                child.run(f"{NUMBER_VARIABLE} = {child.index}")

    def _run_in_all(
        self, commands: SessionCommands, code: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Runs code in all children at the same time, and publishes what each did in order."""
        children = commands.children
        self._write = lambda *_: None  # a cell keeps it
        try:
            with ThreadPoolExecutor(len(children)) as pool:
                cells = list(pool.map(lambda child: self._run(child, code, options), children))
        finally:
            self._write = self._send_stream
        replies = []
        for child, cell in zip(children, cells, strict=True):
            self._print(f"child {child.index}:\n")
            self._print(cell.stdout)
            self._print(cell.stderr, "stderr")
            replies.append(self._published(cell))
        return next((reply for reply in replies if reply["status"] != "ok"), replies[-1])

    def _run(self, place: Session | Child, code: str, options: dict[str, Any]) -> Cell:
        from branching.jupyter import shell

        return place.run(partial(shell.execute, **options), code, self.execution_count)

    def _published(self, cell: Cell) -> dict[str, Any]:
        if cell.exception is not None or not isinstance(cell.value, dict):
            error = cell.exception or cell.value_error
            return self._failed(type(error).__name__, str(error), [str(error)])
        done = cell.value
        for kind, data, metadata, transient in done["outputs"]:
            self._publish(kind, json_clean(encode_images(data)), metadata, transient)
        if done["error"]:
            return self._failed(*done["error"])
        return self._succeeded(done)

    def _publish(
        self, kind: str, data: dict[str, Any], metadata: dict[str, Any], transient: dict[str, Any]
    ) -> None:
        if kind == "clear":
            self.send_response(self.iopub_socket, "clear_output", metadata)
            return
        content = {"data": data, "metadata": json_clean(metadata), "transient": transient}
        message = {"display": "display_data", "update": "update_display_data"}.get(kind)
        if message is None:
            message = "execute_result"
            content["execution_count"] = self.execution_count
        self.send_response(self.iopub_socket, message, content)

    def _succeeded(self, done: dict[str, Any]) -> dict[str, Any]:
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": done.get("payload", []),
            "user_expressions": done.get("user_expressions", {}),
        }

    def _failed(self, name: str, text: str, lines: list[str]) -> dict[str, Any]:
        content = {"ename": name, "evalue": text, "traceback": lines}
        self.send_response(self.iopub_socket, "error", content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    # Output.

    def _send_stream(self, name: str, data: bytes) -> None:
        self._print(self._decoders[name].decode(data), name)

    def _print(self, text: str, name: str = "stdout") -> None:
        if text:
            self.send_response(self.iopub_socket, "stream", {"name": name, "text": text})

    # Questions of the front end.

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        """Completes a name."""
        from branching.jupyter import shell

        found = await self._asked(shell.complete, code, cursor_pos) or {
            "matches": [],
            "cursor_start": cursor_pos,
        }
        return {**found, "cursor_end": cursor_pos, "metadata": {}, "status": "ok"}

    async def do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, *_: Any
    ) -> dict[str, Any]:
        """Documents a name."""
        from branching.jupyter import shell

        found = await self._asked(shell.inspect, code, cursor_pos, detail_level)
        return {"status": "ok", "found": bool(found), "data": found or {}, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        """Says whether a cell is whole."""
        status, spaces = TransformerManager().check_complete(code)
        return {"status": status, "indent": " " * (spaces or 0)}

    async def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Asks the shell. None where there is no answer: the cell says what is wrong."""

        def ask() -> Any:
            try:
                cell = self._started().place.run(function, *arguments)
            except (BranchingError, CommandError):
                return None
            return cell.value

        return await run_in_thread(ask)

    # The session.

    def _started(self) -> SessionCommands:
        """Returns the session; starts it before the first cell."""
        if self._commands is None:
            from branching.jupyter import shell

            session = Session(
                os.environ.get(WORKSPACE_VARIABLE) or ".",
                stdout=lambda data: self._write("stdout", data),
                stderr=lambda data: self._write("stderr", data),
            ).__enter__()
            commands = SessionCommands(session)
            try:
                session.run(shell.start, list(commands.table)).result()
            except BaseException:
                session.abort()
                raise
            self._commands = commands
        return self._commands

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """Ends the session. What it has not committed stays in a branch."""
        commands, self._commands = self._commands, None
        if commands is not None:
            await run_in_thread(lambda: self._leave(commands.session))
        return {"status": "ok", "restart": restart}

    def _leave(self, session: Session) -> None:
        try:
            if name := leave(session):
                self.log.warning(
                    "the files of the session stay in the branch %s: branching diff %s", name, name
                )
        except BranchingError as error:
            self.log.error("the session's end failed: %s", error)
        finally:
            session.__exit__(None, None, None)
