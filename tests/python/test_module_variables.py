"""Variables of the program's own modules, in functions that run in processes of their own: as they
are when the function is started, as in a thread or after a fork.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONF = """
X = "as written"
LIST = ["as written"]
class Settings:
    limit = "as written"
    def __init__(self): self.debug = "as written"
    def text(self): return f"{self.debug} {OF_METHOD}"
settings = Settings()
OF_METHOD = "as written"
INNER = "as written"
OTHER = object()
def helper(): return INNER
"""
OTHER = """
import conf
from conf import LIST
def read(): return conf.X, LIST
"""
PROGRAM = """
import sys
from pathlib import Path
import conf, other, package.sub
from branching import BranchContext
conf.X = conf.INNER = conf.OF_METHOD = package.sub.Y = "set"
conf.LIST.append("set")
conf.Settings.limit = "set"
conf.settings.debug = "set"
CASES = {
    "attribute": lambda path: conf.X,
    "read by a function of the module": lambda path: conf.helper(),
    "read through another module": lambda path: other.read(),
    "object": lambda path: (conf.settings.debug, conf.settings.text()),
    "class": lambda path: conf.Settings.limit,
    "list": lambda path: conf.LIST,
    "package": lambda path: package.sub.Y,
    "types stay": lambda path: (isinstance(conf.settings, conf.Settings), str(type(conf.OTHER))),
}
def imported_inside(path):
    import conf
    from package.sub import Y
    from conf import INNER
    return conf.X, Y, INNER
CASES["imported inside"] = imported_inside
here = CASES[sys.argv[1]](None)
with BranchContext(CASES[sys.argv[1]], ".") as context:
    context.wait(60)
    assert context.result.value == here, (context.result.value, here)
"""


@pytest.mark.parametrize(
    "case",
    [
        "attribute", "read by a function of the module", "read through another module", "object",
        "class", "list", "package", "types stay", "imported inside",
    ],
)  # fmt: skip
def test_a_function_sees_variables_of_modules_as_they_are(tmp_path: Path, case: str) -> None:
    (tmp_path / "package").mkdir()
    for name, text in (
        ("conf.py", CONF), ("other.py", OTHER), ("package/__init__.py", ""),
        ("package/sub.py", "Y = 'as written'"), ("program.py", PROGRAM),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "program.py", case],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
