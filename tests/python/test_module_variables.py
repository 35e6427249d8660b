"""Variables of the program's own modules, in functions that run in processes of their own: as they
are when the function is started, as in a thread or after a fork.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONF = """
import threading
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
CLIENT = MADE = HOOK = None
OBJECTS = []
class Inner:
    def __init__(self, text="as written"): self.text = text
class Slotted:
    __slots__ = ("text",)
class Busy:
    def __init__(self): self.lock = threading.Lock(); self.text = "as written"
class Open:
    def __init__(self): self.file = open("/dev/null"); self.text = "as written"
busy, opened, KEPT, PLAIN = Busy(), Open(), Inner(), Inner()
def helper(): return INNER
"""
OTHER = """
import conf
from conf import LIST, settings
def read(): return conf.X, LIST
"""
PROGRAM = """
import datetime, sys
from pathlib import Path
import conf, other, package.sub
from branching import BranchContext
conf.X = conf.INNER = conf.OF_METHOD = package.sub.Y = "set"
conf.LIST.append("set")
conf.Settings.limit = "set"
conf.settings.debug = "set"
class Own:
    def __init__(self, text): self.text = text
conf.CLIENT, conf.MADE, conf.HOOK = conf.Inner("set"), Own("set"), lambda: "set"
conf.settings.inner = conf.Inner("set")
conf.OBJECTS.append(conf.Inner("set"))
conf.WHEN, conf.PLACE = datetime.date(2026, 1, 2), Path("/set")
conf.Settings.patched = lambda self: "set"
conf.Settings.part = conf.Inner("set")
conf.busy.text = conf.opened.text = conf.KEPT.text = "set"
conf.SLOTTED = conf.Slotted()
conf.SLOTTED.text = "set"
conf.PLAIN = Own("set")
CASES = {
    "an object where there was none": lambda path: (
        conf.CLIENT.text, isinstance(conf.CLIENT, conf.Inner)
    ),
    "an object of the script": lambda path: (conf.MADE.text, conf.PLAIN.text),
    "a function": lambda path: conf.HOOK(),
    "an object in an object": lambda path: conf.settings.inner.text,
    "an object in a list": lambda path: [each.text for each in conf.OBJECTS],
    "objects of the library": lambda path: (conf.WHEN, conf.PLACE.name),
    "a patched method": lambda path: conf.settings.patched(),
    "an object in a class": lambda path: (conf.Settings.part.text, conf.settings.text()),
    "an object with a lock": lambda path: (conf.busy.text, conf.busy.lock.locked()),
    "an object with a file": lambda path: conf.opened.text,
    "an object with slots": lambda path: conf.SLOTTED.text,
    "one object by two names": lambda path: (other.settings is conf.settings, conf.KEPT.text),
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
        "an object where there was none", "an object of the script", "a function",
        "an object in an object", "an object in a list", "objects of the library",
        "a patched method", "an object in a class", "an object with a lock",
        "an object with a file", "an object with slots", "one object by two names",
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
