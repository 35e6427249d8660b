"""Pickles a function with all objects it refers to, for another process.

pickle sends functions and classes by name, and the receiver imports them. That is right for
installed packages. The program's own code is sent by value: the code, the closure, and the current
values of the module's variables that it names. So lambdas, nested functions and functions of a
script work, and they get copies of the values that a fork would have. A lock arrives unlocked.

An object that cannot be copied (a socket, a generator, a thread) is an error that names the
variable. The receiver imports the program's own modules that a function names, and sets the
variables that it uses there to their current values (`_settings`). For a file object over a pipe,
the descriptor is sent along. No other descriptor is sent; an integer is never taken for one.

A class or function that comes back is the original one, not a copy: both sides number the objects
that were sent by value (`originals`).

cloudpickle 3.1 is no substitute: it refuses a lock in a variable and a pipe that is open for
writing, imports the program's modules without the values that the program has set in them, and its
error does not name the variable. The parts above that it lacks would remain beside it.
"""

from __future__ import annotations

import abc
import builtins
import dataclasses
import dis
import enum
import fcntl
import importlib
import io
import marshal
import os
import pickle
import stat
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from branching.errors import ForkError

_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_SENTINELS = {
    id(getattr(dataclasses, name)): name
    for name in (
        "MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR", "_HAS_DEFAULT_FACTORY"
    )
}  # fmt: skip
"""Objects that are compared by identity: sent by name."""
_NAMELESS = {kind: name for name, kind in vars(types).items() if isinstance(kind, type)}
"""Types that no module has under their own name."""
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.TextIOWrapper)
_STANDARD_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_DATA_DEPTH_MAX = 20
SETTING_BYTES_MAX = 16 << 20
"""Of an object in a variable of an imported module. A larger one is as the module makes it."""
_NOT_CARRIED = frozenset({"__dict__", "__weakref__", "_abc_impl", "__annotations__"})
_ENUM_OWN = frozenset(
    {"_member_names_", "_member_map_", "_value2member_map_", "_member_type_", "__new__"}
    | {"_new_member_", "_value_repr_", "_use_args_", "_unhashable_values_", "_hashable_values_"}
    | {"_generate_next_value_", "__reduce_ex__", "__new_member__", "_unhashable_values_map_"}
)


FIRST_FILE = 3
"""The number that the first of the files sent has in the receiving process."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """A function with its arguments, as it is sent."""

    data: bytes
    originals: list[object]
    """The functions and classes that were sent by value."""
    files: list[int]
    """Duplicates of the descriptors of the pipes it names. The receiver must have them open as
    FIRST_FILE and following."""


def pack(function: Callable[..., object], *arguments: object, passes_files: bool = False) -> Packed:
    """Returns a function with its arguments as bytes, and what belongs to them.

    With `passes_files`, file objects over pipes are sent, too. Raises ForkError that names what
    cannot be sent.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, passes_files=passes_files)
    try:
        packer.dump((function, arguments))
    except BaseException as error:
        packer.close_files()
        if not isinstance(error, Exception):
            raise
        # Whatever an object's __reduce__ raises.
        culprit = _culprit(function, arguments, passes_files=passes_files)
        raise ForkError(
            f"{_name_of(function)} cannot be sent to another process{culprit}: {error}; nothing "
            "ran",
            hint="make it, or import it, inside the function",
        ) from error
    return Packed(buffer.getvalue(), packer.originals, packer.files)


def unpack(data: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Unpickles an object in the receiving process."""
    function, arguments = pickle.loads(data)
    return function, arguments


received: dict[int, int] = {}
"""In the receiving process: the number of each thing that was sent by value, by its id."""
_kept: list[object] = []
_spaces: dict[int, dict[str, Any]] = {}
"""The variables of each module that functions came from, by the sender's id of them."""


def is_own_code(module_name: str | None) -> bool:
    """Whether a module is the program's own: neither the library's nor an installed package."""
    if not module_name or module_name == "__main__" or module_name not in sys.modules:
        return True
    top = module_name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "branching":
        return False
    file = getattr(sys.modules[module_name], "__file__", None)
    if file is None:
        return getattr(sys.modules[module_name], "__path__", None) is None
    return not file.startswith(_INSTALLED) and "-packages/" not in file


class _Packer(pickle.Pickler):
    def __init__(
        self, buffer: io.BytesIO, *, passes_files: bool = False, sends_settings: bool = True
    ) -> None:
        super().__init__(buffer, protocol=5)
        self._sends_settings = sends_settings
        self._sendable = _Sendable()
        self.originals: list[object] = []
        self.files: list[int] = []
        self._passes_files = passes_files

    def close_files(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, types.FunctionType):
            return NotImplemented if _is_by_name(thing) else self._function(thing)
        if isinstance(thing, type):
            if _is_by_name(thing):
                return NotImplemented
            return (
                (getattr, (types, _NAMELESS[thing])) if thing in _NAMELESS else self._class(thing)
            )
        if isinstance(thing, types.ModuleType):
            return _module, (thing.__name__, getattr(thing, "__file__", None))
        if isinstance(thing, _FILES) and self._passes_files and not _is_standard(thing):
            return self._file(thing)
        return _plain(thing)

    def _file(self, file: Any) -> Any:
        """Sends a file object over a pipe. Nothing else that is open: a directory leads out of a
        sandbox, a connection acts outside of it, and a file would be written there.
        """
        if not stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise TypeError(
                f"{file!r} is not a pipe: pipes are the only open files that can be passed on"
            )
        mode, buffering, encoding, errors = "", 0, None, None
        if isinstance(file, io.TextIOWrapper):
            buffering = 1 if file.line_buffering else -1
            encoding, errors = file.encoding, file.errors
            file = file.buffer
        elif not isinstance(file, io.FileIO):
            buffering = -1
        raw = getattr(file, "raw", file)
        mode = raw.mode if encoding is None else raw.mode.replace("b", "")
        self.files.append(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, FIRST_FILE))
        number = FIRST_FILE + len(self.files) - 1
        return open, (number, mode, buffering, encoding, errors)

    def _numbered(self, thing: object) -> int:
        self.originals.append(thing)
        return len(self.originals) - 1

    def _function(self, function: types.FunctionType) -> Any:
        cells = function.__closure__ or ()
        names = _names_in(function.__code__)
        space = function.__globals__
        variables = {name: space[name] for name in names if name in space}
        for name in ("__name__", "__file__", "__package__"):
            variables.setdefault(name, space.get(name))
        modules = [
            f"{value.__name__}.{name}"
            for value in variables.values()
            if isinstance(value, types.ModuleType)
            for name in names
            if f"{value.__name__}.{name}" in sys.modules
        ]
        skeleton = (marshal.dumps(function.__code__), id(space), len(cells), function.__name__)
        state = {
            "number": self._numbered(function),
            "variables": variables,
            "modules": modules,
            "settings": _settings(function, self._sendable) if self._sends_settings else [],
            "cells": [_content(cell) for cell in cells],
            "defaults": function.__defaults__,
            "keyword_defaults": function.__kwdefaults__,
            "attributes": dict(function.__dict__),
            "qualified": function.__qualname__,
            "module": function.__module__,
            "text": function.__doc__,
        }
        return _function_skeleton, skeleton, state, None, None, _fill_function

    def _class(self, kind: type) -> Any:
        carried = {
            name: value
            for name, value in vars(kind).items()
            if name not in _NOT_CARRIED and not isinstance(value, types.GetSetDescriptorType)
        }
        if issubclass(kind, enum.Enum):
            members = {name: member.value for name, member in kind.__members__.items()}
            rest = {k: v for k, v in carried.items() if k not in _ENUM_OWN and k not in members}
            arguments = (kind.__name__, kind.__bases__, members, rest, self._numbered(kind))
            return _enum, arguments
        slots = carried.pop("__slots__", None)
        names = (slots,) if isinstance(slots, str) else tuple(slots or ())
        for name in names:
            carried.pop(name, None)
        skeleton = (type(kind), kind.__name__, kind.__bases__, None if slots is None else names)
        state = {"number": self._numbered(kind), "carried": carried}
        return _class_skeleton, skeleton, state, None, None, _fill_class


def _plain(thing: Any) -> Any:
    """Says how to make again what pickle cannot, though it is harmless."""
    if isinstance(thing, _LOCK):
        return threading.Lock, ()
    if isinstance(thing, _RLOCK):
        return threading.RLock, ()
    if isinstance(thing, types.MappingProxyType):
        return types.MappingProxyType, (dict(thing),)
    if isinstance(thing, property):
        return property, (thing.fget, thing.fset, thing.fdel, thing.__doc__)
    if isinstance(thing, (classmethod, staticmethod)):
        return type(thing), (thing.__func__,)
    if id(thing) in _SENTINELS:
        return _SENTINELS[id(thing)]
    if isinstance(thing, io.TextIOWrapper) and (name := _standard_name(thing)):
        return getattr, (sys, name)
    return NotImplemented


def _standard_name(file: object) -> str | None:
    return next((name for name in _STANDARD_STREAMS if file is getattr(sys, name)), None)


def _is_standard(file: object) -> bool:
    return _standard_name(file) is not None


def _is_by_name(thing: Any) -> bool:
    """Whether the receiver can import it."""
    if is_own_code(thing.__module__) or "<locals>" in thing.__qualname__:
        return False
    found: Any = sys.modules.get(thing.__module__)
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def _names_in(code: types.CodeType) -> set[str]:
    """Lists the names by which code, and code within it, may mean variables of its module."""
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")
        or instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_FROM")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _settings(
    function: types.FunctionType, settings: _Sendable
) -> list[tuple[str, str | None, dict[str, Any]]]:
    """Returns the current values of variables in the program's own modules.

    The receiver imports such a module and gets the initial values. Only variables are sent that the
    function uses, or a function of such a module that it names, and attributes of classes in them.
    If an object cannot be copied, those of its attributes are sent that can be.
    """
    found: dict[str, dict[str, Any]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    space = function.__globals__
    names = frozenset(_names_in(function.__code__))
    todo = [(space[name], names) for name in names if name in space]
    todo += [(module, names) for module in _imported_in(function.__code__)]
    todo = [each for each in todo if isinstance(each[0], types.ModuleType)]
    while todo:
        module, names = todo.pop()
        key = (module.__name__, names)
        if key in seen or module.__name__ == "__main__" or not is_own_code(module.__name__):
            continue
        seen.add(key)
        values = found.setdefault(module.__name__, {})
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                todo.append((value, names))
                continue
            if is_own_code(getattr(value, "__module__", None)) and not is_data(value):
                todo += _mentioned_by(value)
            is_at_home = _is_named(value, module.__name__, name)
            sent = None if is_at_home else settings.of(value)
            if sent is not None:
                values[name] = sent[0]
                continue
            for part, content in _parts(value):
                if (sent := settings.of(content)) is not None:
                    values[f"{name}.{part}"] = sent[0]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in found}
    return [(name, files[name], values) for name, values in found.items() if values]


class _Setting(NamedTuple):
    """An object as it is sent: classes and functions of imported modules by their names."""

    data: bytes


class _NamingPacker(pickle.Pickler):
    """Sends objects of the program's own modules by name if the receiver can import them.

    An object in a module that the receiver imports must have that module's class.
    """

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, (type, types.FunctionType)) and is_own_code(thing.__module__):
            module = sys.modules.get(thing.__module__)
            is_main = module is None or module.__name__ == "__main__"
            if is_main or not _is_named(thing, thing.__module__, thing.__qualname__):
                raise pickle.PicklingError(f"{thing!r} cannot be imported")
            return _named, (thing.__module__, getattr(module, "__file__", None), thing.__qualname__)
        if isinstance(thing, types.ModuleType):
            return _module, (thing.__name__, getattr(thing, "__file__", None))
        return _plain(thing)


def _is_named(thing: Any, module: str, qualified: str) -> bool:
    """Returns whether a class or function is the one of that name in that module."""
    if not isinstance(thing, (type, types.FunctionType)) or thing.__module__ != module:
        return False
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found is thing and thing.__qualname__ == qualified


class _Sendable:
    """In what form values of variables can be sent; each is tried once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object] | None] = {}

    def of(self, value: Any) -> tuple[object] | None:
        """Returns what to send; None if the value cannot be sent."""
        if is_data(value):
            return (value,)
        # A bare object is a mark that is compared by identity, and a workspace means nothing there.
        if type(value) is object or type(value).__module__.partition(".")[0] == "branching":
            return None
        if id(value) not in self._known:
            self._known[id(value)] = self._tried(value)
        return self._known[id(value)]

    def _tried(self, value: Any) -> tuple[object] | None:
        buffer = io.BytesIO()
        try:
            _NamingPacker(buffer, protocol=5).dump(value)
            is_small = buffer.tell() <= SETTING_BYTES_MAX
            return (_Setting(buffer.getvalue()),) if is_small else None
        except Exception:
            pass  # whatever an object's __reduce__ raises
        # What the script defines, or a function, cannot be imported: it is sent by value.
        trial = io.BytesIO()
        try:
            _Packer(trial, sends_settings=False).dump(value)
        except Exception:
            return None
        return (value,) if trial.tell() <= SETTING_BYTES_MAX else None


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Lists the attributes of a class, or an object, that the program may have set."""
    if isinstance(value, (types.FunctionType, enum.EnumMeta)):
        return []
    content = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[:2] != "__"}
    if not isinstance(value, type):
        return list(content.items())
    is_ordinary = type(value) in (type, abc.ABCMeta)
    return [
        (name, part)
        for name, part in content.items()
        if is_data(part) or (is_ordinary and not _is_of_class(part, f"{value.__qualname__}.{name}"))
    ]


def _is_of_class(part: Any, qualified: str) -> bool:
    """Whether it is in a class because the class was written so: a method, a property."""
    if isinstance(part, types.FunctionType):
        return part.__qualname__ == qualified
    return hasattr(type(part), "__get__")


def _mentioned_by(value: Any) -> list[tuple[types.ModuleType, frozenset[str]]]:
    """Lists the modules of a function, or of a class's methods, with the names they mention; and
    of the classes that an object or a class is built upon, with their names.
    """
    if isinstance(value, types.FunctionType):
        functions, kinds = [value], []
    else:
        mro = (value if isinstance(value, type) else type(value)).__mro__
        kinds = [kind for kind in mro if is_own_code(kind.__module__)]
        functions = [each for kind in kinds for each in vars(kind).values()]
    named: list[tuple[Any, frozenset[str]]]
    named = [(kind, frozenset({kind.__name__})) for kind in kinds]
    named += [
        (each, frozenset(_names_in(each.__code__)))
        for each in functions
        if isinstance(each, types.FunctionType)
    ]
    return [
        (sys.modules[each.__module__], names)
        for each, names in named
        if each.__module__ in sys.modules
    ]


def _imported_in(code: types.CodeType) -> list[types.ModuleType]:
    """Lists the modules that code imports when it runs, as far as they are loaded here."""
    found = [
        sys.modules[str(instruction.argval)]
        for instruction in dis.get_instructions(code)
        if instruction.opname == "IMPORT_NAME" and instruction.argval in sys.modules
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _imported_in(constant)
    return found


def is_data(value: object, depth: int = 0) -> bool:
    """Returns whether a value is a number, text, or a container of such."""
    if type(value) in _ATOMS:
        return True
    if depth > _DATA_DEPTH_MAX or type(value) not in (list, tuple, dict, set, frozenset):
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(is_data(item, depth + 1) for item in items)  # type: ignore[attr-defined]


def _content(cell: types.CellType) -> tuple[object, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()  # not bound yet


# What follows runs in the receiving process, called by pickle.


def _module(name: str, file: str | None) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        if file is None or name == "__main__":
            raise
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be imported from {file}")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _named(module: str, file: str | None, qualified: str) -> Any:
    found: Any = _module(module, file)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _set_values(module: str, file: str | None, values: dict[str, Any]) -> None:
    try:
        top = _module(module, file)
    except Exception:
        return  # the function meets the same error, if it imports the module at all
    for path, value in values.items():
        *way, name = path.split(".")
        holder: Any = top
        for part in way:
            holder = getattr(holder, part, None)
        if not hasattr(holder, "__dict__"):
            continue
        if isinstance(value, _Setting):
            try:
                value = pickle.loads(value.data)  # noqa: PLW2901
            except Exception:
                continue  # its class can make no copies: it is as the import has made it
        now = vars(holder).get(name)
        if now is not value and type(now) is type(value) and isinstance(value, (list, dict, set)):
            now.clear()  # others may have imported the object itself
            now.extend(value) if isinstance(value, list) else now.update(value)
        elif _is_instance_pair(now, value):
            vars(now).clear()
            vars(now).update(vars(value))
        elif isinstance(holder, (type, types.ModuleType)):
            setattr(holder, name, value)
        else:
            vars(holder)[name] = value


def _is_instance_pair(now: Any, value: Any) -> bool:
    """Whether they are two objects of one class of the program's own, with attributes alone."""
    kind = type(value)
    return (
        now is not value
        and type(now) is kind
        and is_own_code(kind.__module__)
        and not isinstance(value, (type, types.FunctionType))
        and hasattr(now, "__dict__")
        and kind.__basicsize__ == _Attributes.__basicsize__
    )


class _Attributes:
    """As large as any object that has attributes and nothing else."""


def _function_skeleton(code: bytes, space: int, cells: int, name: str) -> types.FunctionType:
    variables = _spaces.setdefault(space, {"__builtins__": builtins})
    empty = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(marshal.loads(code), variables, name, None, empty)


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    _note(function, state["number"])
    for name in state["modules"]:
        importlib.import_module(name)
    for name, file, values in state["settings"]:
        _set_values(name, file, values)
    function.__globals__.update(state["variables"])
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        if content:
            cell.cell_contents = content[0]
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["keyword_defaults"]
    function.__dict__.update(state["attributes"])
    function.__qualname__ = state["qualified"]
    function.__module__ = state["module"]
    function.__doc__ = state["text"]


def _class_skeleton(
    meta: type, name: str, bases: tuple[type, ...], slots: tuple[str, ...] | None
) -> type:
    made: type = types.new_class(
        name, bases, {"metaclass": meta}, lambda body: body.update(
            {} if slots is None else {"__slots__": slots}
        )
    )  # fmt: skip
    return made


def _fill_class(kind: type, state: dict[str, Any]) -> None:
    _note(kind, state["number"])
    for name, value in state["carried"].items():
        setattr(kind, name, value)


def _enum(
    name: str, bases: tuple[type, ...], members: dict[str, Any], rest: dict[str, Any], number: int
) -> type:
    made: type = types.new_class(name, bases, {}, lambda body: _fill_enum(body, members, rest))
    _note(made, number)
    return made


def _fill_enum(body: Any, members: dict[str, Any], rest: dict[str, Any]) -> None:
    for name, value in (*rest.items(), *members.items()):
        body[name] = value


def _note(thing: object, number: int) -> None:
    received[id(thing)] = number
    _kept.append(thing)


# Error messages.


def _culprit(function: Any, arguments: tuple[object, ...], *, passes_files: bool) -> str:
    """Names the variable that cannot be sent, if it is one."""
    code = getattr(function, "__code__", None)
    suspects: list[tuple[str, object]] = []
    if code is not None:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        suspects += [(f"its variable {name!r}", v) for name, cell in cells for v in _content(cell)]
        space = function.__globals__
        suspects += [
            (f"the variable {name!r} of its module", space[name])
            for name in sorted(_names_in(code))
            if name in space
        ]
    suspects += [("an argument", argument) for argument in arguments]
    for what, value in suspects:
        packer = _Packer(io.BytesIO(), passes_files=passes_files)
        try:
            packer.dump(value)
        except Exception:
            return f" ({what})"
        finally:
            packer.close_files()
    return ""


def _name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", function))
