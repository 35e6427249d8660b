"""The imports of the wrapper's modules, those inside of functions and for type checkers included."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import branching_docker

PACKAGE = branching_docker.__name__
SOURCES = {path.stem: path for path in Path(branching_docker.__file__).parent.glob("*.py")}


def imported(path: Path) -> set[str]:
    """Returns the modules of the package that a module imports anywhere; "__init__" for the package itself."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names |= {f"{PACKAGE}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    modules = {name.partition(".")[2] for name in names if name.partition(".")[0] == PACKAGE}
    return {module if module in SOURCES else "__init__" for module in modules}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: imported(path) for name, path in SOURCES.items()}
    assert {"engine", "plan"} <= graph["warm_container"] | graph["container_run"], "imports for type checkers count"
    assert "cli" in graph["__main__"], "imports inside of functions count"
    TopologicalSorter(graph).prepare()
