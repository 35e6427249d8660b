"""The interpreter of a session. Runs in the sandbox, as the function that was started there.

It has one thread and answers one request at a time. A request is one message with descriptors, the
answer is one JSON message:

    run            request, result              executes code, or calls a function
    check T        nothing                      says what is in the way of a fork (T=1: not threads)
    park F         nothing                      closes the files of the workspace (F=1: flushes)
    fork           socket, output, error, …     forks one child for each three descriptors
    unpark         nothing                      opens the files again, in the branch seen now
    end            nothing                      flushes all files and runs exit functions

A forked child has the same state and goes on with its own socket. It copies its mount table, says
`{"here": true}` there, and waits: the mount helper changes the copy (`mount_helper`).
"""

from __future__ import annotations

import ast
import atexit
import gc
import io
import json
import linecache
import os
import pickle
import signal
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from branching._linux import fd_passing, syscalls
from branching.process.functions import function_pickle, result_channel
from branching.session import parking

ANSWER_BYTES_MAX = 60_000
TEXT_CHARACTERS_MAX = 10_000
_ADMIN = 1 << syscalls.CAP_SYS_ADMIN


def serve(at: Any, control: int) -> NoReturn:
    """Serves requests on the descriptor `control` until the caller closes its end."""
    # Nothing is inheritable from here on, so programs have no capabilities.
    syscalls.set_capabilities(permitted=_ADMIN, effective=0)
    worker = _Worker(str(at), socket.socket(fileno=control))
    while True:
        worker.step()


class _Worker:
    def __init__(self, at: str, control: socket.socket) -> None:
        self._at = at
        self._control = control
        os.set_inheritable(control.fileno(), False)
        self._parked: parking.Parked | None = None
        self._cells = 0
        self._injected: dict[int, set[str]] = {}
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._variables = module.__dict__
        self._variables["__builtins__"] = __builtins__
        sys.argv = [""]
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # who waits for a cell sees what it prints
        self._adopt_orphans()
        self._answer(here=True, python=sys.implementation.cache_tag)

    def step(self) -> None:
        """Handles one request."""
        message, descriptors = fd_passing.receive(self._control)
        if not message:
            os._exit(0)  # the caller is gone
        verb, _, argument = message.decode().partition(" ")
        handlers: dict[str, Callable[[str, list[int]], None]] = {
            "run": self._run,
            "check": self._check,
            "park": self._park,
            "fork": self._fork,
            "unpark": self._unpark,
            "end": self._end,
        }
        try:
            handlers[verb](argument, descriptors)
        except Exception as error:
            self._answer(failed=f"{type(error).__name__}: {error}")
        finally:
            for descriptor in descriptors:
                with suppress(OSError):
                    os.close(descriptor)

    def _answer(self, **words: Any) -> None:
        data = json.dumps(words).encode()
        if len(data) > ANSWER_BYTES_MAX:
            data = json.dumps({"failed": "the answer is too long"}).encode()
        try:
            self._control.send(data)
        except OSError:
            os._exit(0)  # the caller is gone

    def _adopt_orphans(self) -> None:
        """Makes programs that detach themselves our children, so that a fork can name them."""
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)

    # Running code.

    def _run(self, _: str, descriptors: list[int]) -> None:
        request, result = descriptors
        with open(request, "rb", closefd=False) as file:
            data = file.read()
        text, has_raised = "", False
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            try:
                text = self._call(data, result)
            finally:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _flush_standard()
        except BaseException as error:
            has_raised = True
            _forget_frames(error)
            result_channel.write_exception(result, error)
        self._answer(done=True, raised=has_raised, text=text[:TEXT_CHARACTERS_MAX])

    def _call(self, data: bytes, result: int) -> str:
        kind, content = pickle.loads(data)
        if kind == "code":
            value = self._execute(content)
            if value is not None and function_pickle.is_data(value):
                result_channel.write_value(result, value)
        else:
            function_pickle.received.clear()  # the caller numbers what it sends anew in each call
            function, arguments = function_pickle.unpack(content)
            self._lend_variables(function)
            value = function(*arguments)
            result_channel.write_value(result, value)
        return "" if value is None else repr(value)

    def _execute(self, code: str) -> object:
        """Executes code; returns the value of its last line if that is an expression."""
        self._cells += 1
        name = f"<cell {self._cells}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        tree = ast.parse(code, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, name, "exec"), self._variables)
        if not isinstance(last, ast.Expr):
            return None
        value: object = eval(compile(ast.Expression(last.value), name, "eval"), self._variables)
        if value is not None:
            self._variables["_"] = value
        return value

    def _lend_variables(self, function: Callable[..., object]) -> None:
        """Shows a function the variables of the session, as far as its module has no such name."""
        space = getattr(function, "__globals__", None)
        if space is None or space is self._variables:
            return
        lent = self._injected.setdefault(id(space), set())
        for name in lent:
            space.pop(name, None)
        lent.clear()
        for name, value in self._variables.items():
            if name not in space:
                space[name] = value
                lent.add(name)

    # Forking.

    def _check(self, allows_threads: str, _: list[int]) -> None:
        found = parking.obstacles(
            self._at, {self._control.fileno()}, allows_threads=allows_threads == "1"
        )
        self._answer(refusals=found.refusals, warnings=found.warnings)

    def _park(self, flushes: str, _: list[int]) -> None:
        if flushes == "1":
            _flush_files()
        _flush_standard()
        self._parked = parking.Parked(self._at, {self._control.fileno()})
        self._answer(parked=True)

    def _unpark(self, _: str, __: list[int]) -> None:
        failed = [] if self._parked is None else self._parked.unpark()
        self._parked = None
        gc.unfreeze()
        self._answer(unparked=True, not_opened=failed)

    def _fork(self, _: str, descriptors: list[int]) -> None:
        _note_ended_programs()
        parking.end_openmp_threads()
        gc.freeze()  # a collection in a child would copy every page with objects
        count = len(descriptors) // 3
        for index in range(count):
            if os.fork() == 0:
                self._become_child(descriptors, index)
                return
        self._answer(forked=count)

    def _become_child(self, descriptors: list[int], index: int) -> None:
        control, output, errors = descriptors[3 * index : 3 * index + 3]
        self._control.close()
        self._control = socket.socket(fileno=os.dup(control))
        os.dup2(output, 1)
        os.dup2(errors, 2)
        self._adopt_orphans()
        try:
            syscalls.set_capabilities(permitted=_ADMIN, effective=_ADMIN)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.set_capabilities(permitted=_ADMIN, effective=0)
        except OSError as error:
            self._answer(failed=f"copying the mount table: {error.strerror}")
            os._exit(1)
        parking.own_offsets({0, 1, 2, self._control.fileno(), *descriptors})
        self._answer(here=True, python=sys.implementation.cache_tag)

    def _end(self, _: str, __: list[int]) -> None:
        with suppress(BaseException):  # what users register may raise anything
            atexit._run_exitfuncs()
        _flush_files()
        _flush_standard()
        self._answer(ended=True)


def _forget_frames(error: BaseException) -> None:
    """Takes the frames of this file off the traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback


def _flush_standard() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # replaced or closed by the code
            stream.flush()


def _note_ended_programs() -> None:
    """Sets the return code of programs that have ended: a forked child cannot wait for them."""
    subprocess = sys.modules.get("subprocess")
    with suppress(ChildProcessError):
        if subprocess and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            for program in _instances(subprocess.Popen):
                program.poll()


def _flush_files() -> None:
    for file in _instances(io.IOBase):
        with suppress(Exception):
            if not file.closed:
                file.flush()


def _instances(kind: type) -> list[Any]:
    """Returns all objects of a class. `isinstance` would call code of proxies, which may raise."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
