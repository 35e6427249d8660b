"""The interpreter of a session. Runs in the sandbox, as the function that was started there.

It has one thread and answers one request at a time. A request is one message with descriptors, the
answer is one JSON message:

    run            request, result              executes code, or calls a function
    check T        nothing                      says what is in the way of a fork (T=1: not threads)
    park WHY       nothing                      closes the files of the workspace, before a `fork`,
                                                `pick` or `commit`, which flushes them
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
from branching.session import mappings, parking

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
        self._forked: list[int] = []
        self._outputs = [_identity(1), _identity(2)]
        self._mapped = mappings.MappedFiles(at)
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

    def _own(self) -> set[int]:
        """Returns the descriptors that lead to the caller."""
        return {
            self._control.fileno(),
            *(n for n in parking.descriptors() if _identity(n) in self._outputs),
        }

    def _check(self, allows_threads: str, _: list[int]) -> None:
        for pid in self._forked:
            with suppress(ChildProcessError):  # waited for already
                os.waitpid(pid, os.WNOHANG)
        _note_ended_programs()
        found = parking.obstacles(self._at, self._own(), allows_threads=allows_threads == "1")
        lost = [
            f"process {pid} ({name}) has ended: a forked child cannot wait for it"
            for pid, name in parking.ended_children().items()
            if pid not in self._forked
        ]
        self._answer(refusals=found.refusals, warnings=found.warnings + lost)

    def _park(self, why: str, _: list[int]) -> None:
        if why == "commit":
            _flush_files()
        _flush_standard()
        if why == "fork":
            self._mapped.let_fork()
        else:
            self._mapped.leave()
        self._parked = parking.Parked(self._at, self._own())
        self._answer(parked=True)

    def _unpark(self, _: str, __: list[int]) -> None:
        failed = [] if self._parked is None else self._parked.unpark()
        failed += self._mapped.follow()
        self._parked = None
        gc.unfreeze()
        self._answer(unparked=True, not_opened=failed)

    def _fork(self, _: str, descriptors: list[int]) -> None:
        parking.end_openmp_threads()
        gc.freeze()  # a collection in a child would copy every page with objects
        count = len(descriptors) // 3
        for index in range(count):
            pid = os.fork()
            if pid == 0:
                self._become_child(descriptors, index)
                return
            self._forked.append(pid)
        self._answer(forked=count)

    def _become_child(self, descriptors: list[int], index: int) -> None:
        control, *outputs = descriptors[3 * index : 3 * index + 3]
        self._control.close()
        self._control = socket.socket(fileno=os.dup(control))
        self._replace_outputs(outputs)
        self._forked = []
        self._adopt_orphans()
        _adopt_ended_processes()
        try:
            syscalls.set_capabilities(permitted=_ADMIN, effective=_ADMIN)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.set_capabilities(permitted=_ADMIN, effective=0)
        except OSError as error:
            self._answer(failed=f"copying the mount table: {error.strerror}")
            os._exit(1)
        parking.own_offsets({0, 1, 2, self._control.fileno(), *descriptors})
        self._answer(here=True, python=sys.implementation.cache_tag)

    def _replace_outputs(self, outputs: list[int]) -> None:
        """Lets what led to the session's streams lead to this child's: 1, 2, and duplicates."""
        replaced = dict(zip(self._outputs, outputs, strict=True))
        for number in parking.descriptors():
            if output := replaced.get(_identity(number)):
                os.dup2(output, number, inheritable=os.get_inheritable(number))
        self._outputs = list(map(_identity, outputs))

    def _end(self, _: str, __: list[int]) -> None:
        with suppress(BaseException):  # what users register may raise anything
            atexit._run_exitfuncs()
        _flush_files()
        _flush_standard()
        self._answer(ended=True)


def _identity(number: int) -> tuple[int, int] | None:
    """Returns what an open file is; None for the descriptor of a listing that is over."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
    multiprocessing = sys.modules.get("multiprocessing")
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            for program in _instances(subprocess.Popen) if subprocess else ():
                program.poll()
            if multiprocessing:
                multiprocessing.active_children()


def _adopt_ended_processes() -> None:
    """Lets this forked child join processes of `multiprocessing` that have ended."""
    if process := sys.modules.get("multiprocessing.process"):
        for ended in list(process._dangling):
            if ended._parent_pid == os.getppid():
                ended._parent_pid = os.getpid()


def _flush_files() -> None:
    for file in _instances(io.IOBase):
        with suppress(Exception):
            if not file.closed:
                file.flush()


def _instances(kind: type) -> list[Any]:
    """Returns all objects of a class. `isinstance` would call code of proxies, which may raise."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
