"""Exports of a package that load their module when they are first used (PEP 562)."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def lazy_exports(package: str, modules: "dict[str, str]") -> "Callable[[str], object]":
    """Returns the `__getattr__` of a package whose names are imported on first use.

    It imports nothing but `importlib`, for the fork server loads it too.

    Args:
        package: The package's `__name__`.
        modules: By exported name, the module that has it: relative to the package
            (`".results"`), or absolute.
    """

    def get(name: str) -> object:
        from importlib import import_module

        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(modules[name], package), name)
        vars(import_module(package))[name] = value
        return value

    return get
