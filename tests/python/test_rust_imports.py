"""No two files of a crate of BranchFS import from each other, directly or over others.

A file may use what its own submodules define and pass it on: a name that it passes on counts as an
import from the file that defines it. Submodules may use what the file above them defines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

BRANCHFS = Path(__file__).parents[2] / "branchfs"
CRATES = ["crates/core", "crates/fuse", "crates/sandbox", "."]

UNIT_TESTS = re.compile(r"#\[cfg\(test\)\]\s*\n\s*mod tests \{.*", re.DOTALL)
USE = re.compile(r"^\s*(?:pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)
IN_CODE = re.compile(r"\b(?:crate|super)(?:::\w+)+")

Module = tuple[str, ...]


def used_paths(tree: str, prefix: Module = ()) -> Iterator[Module]:
    """Yields the paths of a `use`: `a::{b, c::D as E}` gives (a, b) and (a, c, D)."""
    item, depth = "", 0
    for sign in f"{tree},":
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if sign != "," or depth:
            item += sign
            continue
        head, braces, rest = item.partition("{")
        parts = (*prefix, *re.findall(r"\w+", re.sub(r"\bas \w+", "", head)))
        if braces:
            yield from used_paths(rest.rstrip().removesuffix("}"), parts)
        elif item.strip():
            yield parts
        item = ""


class Crate:
    """The files of a crate, by the path of their module."""

    def __init__(self, source: Path) -> None:
        self.code: dict[Module, str] = {}
        for file in source.rglob("*.rs"):
            module = file.relative_to(source).with_suffix("").parts
            if any("tests" in part for part in module):
                continue
            if module[-1] in {"lib", "main"}:
                module = module[:-1]
            code = UNIT_TESTS.sub("", file.read_text())
            self.code[module] = re.sub(r"//.*", "", code) + self.code.get(module, "")

    def absolute(self, module: Module, path: Module) -> Module | None:
        """The path from the root of the crate; None for what is of another crate."""
        if path[0] == "crate":
            return path[1:]
        if path[0] in {"super", "self"}:
            levels = sum(part == "super" for part in path)
            rest = tuple(part for part in path if part not in {"super", "self"})
            return module[: len(module) - levels] + rest
        return module + path if (*module, path[0]) in self.code else None

    def imports(self, module: Module) -> Iterator[Module]:
        code = self.code[module]
        inline = (tuple(one.split("::")) for one in IN_CODE.findall(USE.sub("", code)))
        uses = (path for tree in USE.findall(code) for path in used_paths(tree))
        yield from filter(None, (self.absolute(module, path) for path in (*uses, *inline)))

    def defining(self, path: Module) -> Module | None:
        """The file that defines what a path names, over files that pass the name on."""
        module = path
        while module not in self.code:
            if not module:
                return None
            module = module[:-1]
        for onward in self.imports(module) if len(path) > len(module) else ():
            if onward[-1] == path[len(module)] and onward[: len(module)] == module != onward[:-1]:
                return self.defining(onward)
        return module

    def graph(self) -> dict[Module, set[Module]]:
        """Which files each file imports from, but for its own submodules."""
        found = {
            module: {self.defining(path) for path in self.imports(module)} for module in self.code
        }
        return {
            module: {one for one in uses if one is not None and one[: len(module)] != module}
            for module, uses in found.items()
        }


@pytest.mark.parametrize("crate", CRATES)
def test_no_two_files_of_a_crate_import_from_each_other(crate: str) -> None:
    """TopologicalSorter raises CycleError, which names the files of a circle."""
    graph = Crate(BRANCHFS / crate / "src").graph()
    assert sum(map(len, graph.values())) > len(graph)
    assert set(TopologicalSorter(graph).static_order()) >= set(graph)
