"""Values made from pickled bytes of a sandbox, which are not believed.

An unpickler is a machine that the bytes program: they name functions and classes, and have them
called. Bytes that name nothing (numbers, text, lists of them) have nothing to call, and are read by
the quick unpickler. All others are read by Python's own, whose steps that call something are other
ones here. An instance is made by the plain type that its class is built upon, never by a `__new__`
or `__init__` of the class's own, and its state is put into it, never through a method of the
program's. Functions and classes of the program may come home as values; they are not called.
"""

from __future__ import annotations

import builtins
import collections
import copyreg
import enum
import pickle
import re
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

from branching.process.functions import function_pickle

_PLAIN = frozenset(
    {"object", "complex", "range", "slice", "set", "frozenset", "NotImplemented", "Ellipsis"}
)
_HARMLESS = {
    "array": {"array", "_array_reconstructor"},
    "collections": {"OrderedDict", "deque", "defaultdict", "Counter", "ChainMap", "UserDict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "_decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "ipaddress": {"IPv4Address", "IPv6Address", "IPv4Network", "IPv6Network"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "types": {"SimpleNamespace"},
    "uuid": {"UUID", "SafeUUID"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
}
"""Classes, and the functions that pickle makes their instances with."""
_BUILT_UPON = (
    *(object, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset),
)
"""Of the built-in types those that a class may be built upon; exceptions too."""
_SETTING_STATE = frozenset({"uuid", "numpy", "dataclasses", "pydantic.main"})
"""Modules whose `__setstate__` does no more than put the state into its instance."""
_ITERABLE: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(list, tuple, dict, set, frozenset, type),
)
"""What a container may be made of: it exists, and so is as large as the bytes were. A range or
a network of addresses would be made into a list of any length."""
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
"""Methods that are not written in Python, and so do not look at what else an instance has."""
_FRACTION = re.compile(r"-?\d+(/\d+)?")
"""An exponent could ask for a number of any length."""


class NotAcceptedError(Exception):
    """What bytes from a sandbox may not name, or not make."""


def load(stream: Any, originals: Sequence[object], accept: Sequence[type]) -> Any:
    """Reads one value. `originals` are the functions and classes that it may refer to by number;
    instances of classes in `accept` are made as those say.

    NotAcceptedError for what may not be made; any other exception for bytes that make no sense.
    """
    if not copyreg._extension_registry:  # type: ignore[attr-defined]
        try:
            return _PrimitivesUnpickler(stream).load()
        except _NamedError:
            stream.seek(0)
    return _RestrictedUnpickler(stream, originals, accept).load()


def restore_state(thing: Any, state: Any) -> None:
    """Sets attributes of an instance without running code of its class."""
    pair = state if type(state) is tuple and len(state) == 2 else (state, None)
    for attributes in filter(None, pair):
        for name, value in dict(attributes).items():
            if type(name) is not str:
                raise NotAcceptedError(f"attribute named {name!r}")
            _, slot = _provided(type(thing), name)
            if isinstance(slot, types.MemberDescriptorType):
                slot.__set__(thing, value)
            else:
                object.__getattribute__(thing, "__dict__")[sys.intern(name)] = value


def construct(kind: Any, arguments: Any) -> Any:
    """Makes an instance by the plain type that its class is built upon."""
    if not isinstance(kind, type):
        raise NotAcceptedError(f"{_named(kind)} that is to be a class")
    _reject_finalizers(kind)
    base = next(base for base in kind.__mro__ if "__new__" in vars(base) and _is_plain(base))
    if base is object:
        return object.__new__(kind)
    if base is tuple and hasattr(kind, "_fields"):  # a named tuple, which counts its fields
        return tuple.__new__(kind, arguments)
    _reject_unbounded(base, arguments)
    if kind.__module__ == "builtins" and issubclass(kind, BaseException):
        return kind(*arguments)  # some have fields of their own
    return base.__new__(kind, *arguments)


class _NamedError(Exception):
    """The bytes name something."""


class _PrimitivesUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise _NamedError(f"{module}.{name}")

    def persistent_load(self, number: Any) -> Any:
        raise _NamedError(str(number))


class _RestrictedUnpickler(pickle._Unpickler):
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, stream: Any, originals: Sequence[object], accept: Sequence[type]) -> None:
        super().__init__(stream)
        self._originals = originals
        self._accept = accept
        self._makers: set[int] = set()
        """The functions that make instances of harmless types, by their ids."""
        self._made: dict[int, object] = {}
        """What was made here, by its id: only that may be given a state."""

    def persistent_load(self, number: Any) -> object:
        if not isinstance(number, int) or not 0 <= number < len(self._originals):
            raise NotAcceptedError(f"reference to {number!r}")
        return self._originals[number]

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _PLAIN:
            return getattr(builtins, name)
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = vars(found).get(part) if isinstance(found, (types.ModuleType, type)) else None
        if found is not None and name in _HARMLESS.get(module, ()):
            self._makers.add(id(found))
            return found
        if isinstance(found, type) and (
            found in self._accept
            or issubclass(found, BaseException)
            or (function_pickle.is_own_code(found.__module__) and found.__module__ == module)
        ):
            return found
        raise NotAcceptedError(f"{module}.{name}")

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._called(self.stack[-1], arguments)

    def _new(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack[-1]
        is_named = any(kind is named for named in self._accept)
        made = kind.__new__(kind, *arguments) if is_named else construct(kind, arguments)
        self.stack[-1] = self._noted(made)

    def _called(self, maker: Any, arguments: Any) -> Any:
        if any(maker is named for named in self._accept):
            return self._noted(maker(*arguments))
        if isinstance(maker, type) and issubclass(maker, enum.Enum):
            return _member(maker, *arguments)
        if isinstance(maker, type) and issubclass(maker, BaseException):
            return self._noted(construct(maker, arguments))
        for argument in arguments:
            kind = argument if isinstance(argument, type) else type(argument)
            if maker is not collections.defaultdict and function_pickle.is_own_code(
                kind.__module__
            ):
                raise NotAcceptedError(f"{_named(maker)} of {_named(kind)}")
        if isinstance(maker, type):
            _refuse_active(maker)
            _reject_unbounded(maker, arguments)
        elif id(maker) not in self._makers:
            raise NotAcceptedError(f"call of {_named(maker)}")
        return self._noted(maker(*arguments))

    def _build(self) -> None:
        state = self.stack.pop()
        thing = self.stack[-1]
        if id(thing) not in self._made:
            raise NotAcceptedError(f"change of {_named(thing)}")
        kind, set_state = _provided(type(thing), "__setstate__")
        if set_state is None or kind is BaseException:
            restore_state(thing, state)
        elif any(type(thing) is named for named in self._accept) or _sets_state(set_state):
            thing.__setstate__(state)
        else:
            raise NotAcceptedError(
                f"{_named(type(thing))}, which restores its state in its own way"
            )

    def _append(self) -> None:
        item = self.stack.pop()
        _container_method(self.stack[-1], "append")(item)

    def _appends(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        _container_method(self.stack[-1], "extend")(items)

    def _add(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        _container_method(self.stack[-1], "update")(items)

    def _set(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _container_method(self.stack[-1], "__setitem__")(key, value)

    def _sets(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        put = _container_method(self.stack[-1], "__setitem__")
        for place in range(0, len(items), 2):
            put(items[place], items[place + 1])

    def _refuse(self) -> None:
        raise NotAcceptedError("object in an unknown serialization format")

    for _code, _step in (
        (pickle.REDUCE, _reduce), (pickle.NEWOBJ, _new), (pickle.BUILD, _build),
        (pickle.APPEND, _append), (pickle.APPENDS, _appends), (pickle.ADDITEMS, _add),
        (pickle.SETITEM, _set), (pickle.SETITEMS, _sets), (pickle.NEWOBJ_EX, _refuse),
        (pickle.OBJ, _refuse), (pickle.INST, _refuse), (pickle.EXT1, _refuse),
        (pickle.EXT2, _refuse), (pickle.EXT4, _refuse),
    ):  # fmt: skip
        dispatch[_code[0]] = _step

    def _noted(self, made: Any) -> Any:
        self._made[id(made)] = made
        return made


def _provided(kind: type, name: str) -> tuple[Any, Any]:
    """Returns the class that an attribute of a class's instances comes from, and what it is."""
    for base in kind.__mro__:
        if name in vars(base):
            return base, vars(base)[name]
    return None, None


def _is_plain(kind: Any) -> bool:
    """Whether nothing but a value comes of it when this type makes an instance."""
    if kind.__module__ == "builtins":
        return kind in _BUILT_UPON or kind.__name__ in _PLAIN or issubclass(kind, BaseException)
    return kind.__name__ in _HARMLESS.get(kind.__module__, ())


def _reject_finalizers(kind: type) -> None:
    """Refuses instances whose end does something: with the files or processes they hold, say."""
    if hasattr(kind, "__del__"):
        raise NotAcceptedError(f"{_named(kind)}, which has a finalizer")


def _refuse_active(kind: type) -> None:
    """Refuses a class that is not made as the plain type it is built upon."""
    _reject_finalizers(kind)
    is_plain = all(_is_plain(_provided(kind, step)[0]) for step in ("__new__", "__init__"))
    if not is_plain or type(kind).__call__ is not type.__call__:
        raise NotAcceptedError(f"{_named(kind)}, which has its own constructor")


def _reject_unbounded(kind: type, arguments: Any) -> None:
    """Refuses what could become larger than the bytes that ask for it."""
    if issubclass(kind, (str, bytes, tuple, set, frozenset, dict)) or hasattr(kind, "extend"):
        if not all(type(argument) in _ITERABLE for argument in arguments):
            raise NotAcceptedError(f"{_named(kind)} of something else than values")
    elif kind.__name__ == "Fraction" and not all(
        type(argument) is int or _FRACTION.fullmatch(argument) for argument in arguments
    ):
        raise NotAcceptedError("fraction with an exponent")


def _member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    is_looked_up = type(kind).__call__ is enum.EnumMeta.__call__
    if not is_looked_up or function_pickle.is_own_code(getattr(kind._missing_, "__module__", None)):
        raise NotAcceptedError(f"{_named(kind)}, which looks up its members in its own way")
    return kind(value)


def _sets_state(set_state: Any) -> bool:
    module = getattr(set_state, "__module__", None) or set_state.__objclass__.__module__
    return module in _SETTING_STATE


def _container_method(container: Any, name: str) -> Any:
    """Returns the method of the plain container that something is built upon."""
    for base in type(container).__mro__:
        if isinstance(vars(base).get(name), _OF_C) and _is_plain(base):
            return vars(base)[name].__get__(container)
    raise NotAcceptedError(f"{_named(type(container))}, which is extended in its own way")


def _named(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', thing)}"
