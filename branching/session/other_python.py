"""Starts a session in another interpreter than the caller's: that of a virtual environment, say.

The process in the sandbox executes it. It gets the modules of this package, and no other place to
import from: sessions need the standard library alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from branching._linux import syscalls

_PACKAGE = Path(__file__).parent.parent

_START = """
import os, sys
package, at, control = sys.argv[1], sys.argv[2], int(sys.argv[3])
if sys.version_info < (3, 10):
    text = "it is Python %d.%d, and a session needs 3.10 or later" % sys.version_info[:2]
    os.write(control, ('{"failed": "' + text + '"}').encode())
    sys.exit(1)
sys.path.remove("")
import importlib.util, json
try:
    spec = importlib.util.spec_from_file_location("branching", package + "/__init__.py")
    sys.modules["branching"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["branching"])
    from branching.session import worker
except Exception as error:
    text = "it cannot load branching: %s: %s" % (type(error).__name__, error)
    os.write(control, json.dumps({"failed": text}).encode())
    sys.exit(1)
sys.path.insert(0, "")
worker.serve(at, control)
"""
"""Any Python runs it up to the version check."""


def find(python: str | os.PathLike[str]) -> str:
    """Returns the absolute path of an interpreter; a name without a slash is looked up on PATH.

    Raises:
        FileNotFoundError: There is no such program.
        TypeError: It is no path.
    """
    import shutil  # in the sandbox, the owner of a workspace may not read the caller's modules

    name = os.fspath(python)
    if not isinstance(name, str):
        raise TypeError(f"python must be a path, not {python!r}")
    found = shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"python={name!r}: there is no such program")
    return os.path.abspath(found)  # noqa: PTH100  (not where a link leads: venvs have links)


def places(python: str) -> tuple[str, ...]:
    """Returns the directories that an interpreter needs: that of its environment, and its own.

    It is not asked: it may be a file of the workspace, and runs in the sandbox only.
    """
    return tuple(str(Path(path).parent.parent) for path in (python, os.path.realpath(python)))


def execute(python: str, at: str, control: int) -> NoReturn:
    """Becomes the interpreter, in the sandbox, and serves requests on `control`."""
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_RAISE, syscalls.CAP_SYS_ADMIN)
    try:
        os.execv(python, [python, "-c", _START, str(_PACKAGE), at, str(control)])
    except OSError as error:
        os.write(control, json.dumps({"failed": f"{python}: {error.strerror}"}).encode())
    os._exit(1)
