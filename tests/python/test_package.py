"""The package: its public names, its metadata, and which layers an import loads."""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
import typing
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import branching
from branching.patterns.base import Options

PACKAGE = Path(branching.__file__).parent

ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "_caller": set(),
    "_cancellation": set(),
    "_difftool": set(),
    "_exit_codes": set(),
    "_lazy": set(),
    "_linux": set(),
    "_programs": {"errors"},
    "_sanitize": set(),
    "_signals": set(),
    "_standard_streams": set(),
    "_threads": set(),
    "fs": {"_linux", "_programs", "_signals", "_standard_streams", "_threads", "errors"},
    "process": {
        *("_exit_codes", "_lazy", "_linux", "_programs", "_standard_streams", "_threads"),
        "errors",
    },
    "runlog": {"errors", "fs"},
    "patterns": {
        *("_cancellation", "_lazy", "_signals", "_threads"),
        *("errors", "fs", "process", "runlog", "session"),
    },
    "session": {
        *("_lazy", "_linux", "_standard_streams", "_threads"),
        *("errors", "fs", "process"),
    },
    "cluster": {
        *("_cancellation", "_lazy", "_linux"),
        *("errors", "fs", "process", "runlog", "patterns"),
    },
    "agent": {
        *("_difftool", "_exit_codes", "_lazy", "_standard_streams", "_threads"),
        *("errors", "fs", "process", "runlog", "patterns"),
    },
    "mcp": {
        *("_caller", "_cancellation", "_sanitize", "_threads"),
        *("errors", "fs", "process", "runlog", "patterns", "session"),
    },
    "tui": {
        *("_caller", "_exit_codes", "_difftool", "_linux", "_threads"),
        *("errors", "fs", "process", "runlog", "patterns", "agent"),
    },
    "cli": {
        *(
            "_caller",
            "_programs",
            "_exit_codes",
            "_cancellation",
            "_difftool",
            "_linux",
            "_sanitize",
            "_standard_streams",
            "_threads",
        ),
        *("errors", "fs", "process", "runlog", "patterns", "session"),
        *("cluster", "agent", "mcp", "tui"),
    },
    "jupyter": {"_threads", "cli", "errors", "session"},
    "swerex": {"errors", "fs", "process"},
}
"""Which layer may import which. `branching` itself (its version) may be named by the command."""

WITH_EXTRAS = {"cli", "jupyter", "mcp", "tui"}
"""Layers that need packages of others, each an extra of ours."""


def loaded_after(statement: str) -> set[str]:
    """Runs the statement in a clean interpreter; returns the loaded modules of branching."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name for name in done.stdout.split() if name.split(".")[0] == "branching"}


def layers_after(statement: str) -> set[str]:
    return {name.split(".")[1] for name in loaded_after(statement) if "." in name}


@pytest.mark.contract("1.6")
def test_every_public_name_resolves_and_the_list_is_sorted() -> None:
    assert branching.__all__ == sorted(branching.__all__, key=lambda n: (n.lower() != n, n))
    for name in branching.__all__:
        assert getattr(branching, name).__name__ == name


PUBLISHED = """
    Workspace Branch BranchContext ResourceLimits Speculate BestOfN Reflexion TreeOfThoughts
    BeamSearch Tournament Cascaded SpeculationResult SpeculationOutcome BranchingError BranchError
    BranchStaleError BranchNotFoundError CommitError ConflictError AbortError MountError
    ProcessBranchError ForkError NamespaceError MemoryBranchError
"""


@pytest.mark.contract("1.6")
def test_all_names_of_the_published_package_are_there() -> None:
    assert set(PUBLISHED.split()) <= set(branching.__all__)
    assert branching.__version__


@pytest.mark.contract("1.7")
def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = branching.NoSuchThing


@pytest.mark.contract("1.1")
def test_the_version_is_the_distributions() -> None:
    assert branching.__version__ == "0.2.0"


@pytest.mark.contract("1.5", "1.7")
@pytest.mark.parametrize(
    ("statement", "layers"),
    [
        ("import branching", set()),
        ("from branching import BranchingError, ConflictError", {"errors"}),
        (
            "from branching import Workspace",
            {
                *("_linux", "_signals", "_standard_streams", "_threads"),
                *("errors", "fs"),
            },
        ),
        ("import branching.process", {"_lazy", "process"}),
        (
            "from branching import BranchContext",
            {
                *("_exit_codes", "_lazy", "_linux", "_programs", "_standard_streams", "_threads"),
                *("errors", "process"),
            },
        ),
        (
            "from branching import Speculate",
            {
                *("_cancellation", "_lazy", "_linux", "_signals", "_standard_streams", "_threads"),
                *("errors", "fs", "process", "patterns", "runlog"),
            },
        ),
    ],
)
def test_a_name_loads_its_own_layer_only(statement: str, layers: set[str]) -> None:
    """A function candidate needs no process layer."""
    if "Speculate" in statement:
        layers = layers - {"process"}
    assert layers_after(statement) == layers


def _public_functions() -> list[Any]:
    found = []
    for name in branching.__all__:
        thing = getattr(branching, name)
        found.append(pytest.param(thing, id=name))
        for part, attribute in vars(thing).items():
            member = getattr(attribute, "fget", getattr(attribute, "__func__", attribute))
            if inspect.isfunction(member) and (not part.startswith("_") or part == "__init__"):
                found.append(pytest.param(member, id=f"{name}.{part}"))
    return found


@pytest.mark.parametrize("thing", _public_functions())
def test_type_hints_of_public_classes_and_their_methods_can_be_resolved(thing: object) -> None:
    hints = typing.get_type_hints(thing)
    if inspect.isfunction(thing):
        named = inspect.signature(thing).parameters.keys() - {"self", "cls"}
        assert named <= hints.keys()


@pytest.mark.parametrize("pattern", sorted({
    "Speculate", "BestOfN", "Reflexion", "TreeOfThoughts", "BeamSearch", "Tournament", "Cascaded"
}))  # fmt: skip
def test_help_shows_all_options_of_a_pattern(pattern: str) -> None:
    kind = getattr(branching, pattern)
    shown = pydoc.render_doc(kind)
    shared = [*typing.get_type_hints(Options), "timeout"]
    assert len(shared) > 15
    for option in shared:
        assert option in inspect.signature(kind).parameters
        assert f"{option}: " in shown
    assert "**options" not in shown


@pytest.mark.contract("1.5")
def test_importing_the_package_loads_nothing_beside_it() -> None:
    """It does not load typing, which would double the start-up time."""
    bare = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    script = "import sys; import branching; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) - set(bare.stdout.split()) == {"branching"}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_go_along_the_arrows_only(file: Path) -> None:
    place = file.relative_to(PACKAGE)
    layer = place.parts[0].removesuffix(".py")
    if layer not in ARROWS:
        return  # __init__ and __main__ name all layers, lazily
    for node in ast.walk(ast.parse(file.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "branching" and len(parts) > 1:
                assert parts[1] in ARROWS[layer] | {layer}, f"{place} imports {module}"


@pytest.mark.contract("1.3")
def test_the_library_imports_nothing_from_outside() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] in WITH_EXTRAS or _needs_an_extra(file):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.split(".")[0]
                # typing_extensions stands under TYPE_CHECKING: for type checkers, never loaded.
                assert top in {*sys.stdlib_module_names, "branching", "typing_extensions"}, file


FRAMEWORKS = (
    *("acorn", "pydantic_ai", "langgraph.py", "openai_agents.py"),
    *("fork_tools.py", "judge_verdict.py", "live_fork.py"),  # what they have in common
)
"""In `branching/agent`: adapters of agent frameworks. They need the framework, and pydantic."""


def _needs_an_extra(file: Path) -> bool:
    place = file.relative_to(PACKAGE).parts[:2]
    faces = (("cluster", "dask_runner.py"), ("cluster", "ray_runner.py"), ("swerex.py",))
    return place in faces or (place[0] == "agent" and place[1] in FRAMEWORKS)


def test_the_core_of_agents_imports_no_face_of_its_own() -> None:
    """Nor a language model's library: it is `branching.agent` that the faces build on."""
    for file in (PACKAGE / "agent").rglob("*.py"):
        if not _needs_an_extra(file):
            text = file.read_text()
            assert "branching.agent.pydantic_ai" not in text, file
            assert "branching.agent.acorn" not in text, file


def test_no_file_of_the_core_of_agents_needs_itself() -> None:
    """Not even for the names in annotations: each can be read after those that it builds on."""
    graph: dict[str, set[str]] = {}
    for file in (PACKAGE / "agent").rglob("*.py"):
        if file.name != "__init__.py" and not _needs_an_extra(file):
            name = ".".join(("branching", *file.relative_to(PACKAGE).with_suffix("").parts))
            graph[name] = {
                node.module or ""
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.ImportFrom)
            }
    assert "branching.agent.coordinator" in list(TopologicalSorter(graph).static_order())


def _imported(node: ast.AST, modules: set[str]) -> set[str]:
    """Returns which of the modules an import statement loads."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & modules
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return set()
    inner = {f"{node.module}.{alias.name}" for alias in node.names}
    return (inner & modules) or ({node.module} & modules)


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions count; those that only type checkers see do not."""
    files = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file
        for file in PACKAGE.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        tree = ast.parse(file.read_text())
        for_types = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for part in ast.walk(node)
        }
        graph[name] = set()
        for node in ast.walk(tree):
            if node not in for_types:
                graph[name] |= _imported(node, set(files)) - {name}
    assert len(list(TopologicalSorter(graph).static_order())) > 150


@pytest.mark.contract("0.7", "1.1", "1.2", "1.3", "1.4", "1.8")
def test_the_metadata_is_as_published() -> None:
    found = metadata.metadata("branching-workspaces")
    assert found["Name"] == "branching-workspaces"
    assert found["Version"] == branching.__version__
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.10"
    assert found["Summary"] == (
        "Unified branching for speculative execution: filesystem, process, and memory"
    )
    classifiers = found.get_all("Classifier") or []
    assert "Programming Language :: Python :: 3" in classifiers
    assert "Operating System :: POSIX :: Linux" in classifiers
    needed = metadata.requires("branching-workspaces") or []
    assert all("extra ==" in requirement for requirement in needed)
    scripts = {
        point.name: point.value
        for point in metadata.entry_points(group="console_scripts")
        if point.value.startswith("branching.")
    }
    assert scripts == {"branching": "branching.__main__:main"}
    tops = {(path.parts[0]) for path in metadata.files("branching-workspaces") or []}
    assert not any(top == "cli" for top in tops), "1.8: no package named cli"


def test_hints_and_documents_install_extras_that_exist_from_the_source_tree() -> None:
    """This project has no package on the index: a name there would be another project's."""
    extras = set(metadata.metadata("branching-workspaces").get_all("Provides-Extra") or [])
    root = PACKAGE.parent
    files = [*PACKAGE.rglob("*.py"), *root.glob("*.md"), *(root / "docs").glob("*.md")]
    files += [*(root / "examples").rglob("*.py"), *(root / "skills").rglob("*.md")]
    named = [
        (file.name, place, extra)
        for file in files
        if file.name != "CHANGELOG.md"
        for place, extra in re.findall(r"""pip install ["']([^"'\[]*)\[(.*?)\]""", file.read_text())
        if not place.startswith("pydantic-ai")
    ]
    assert len(named) > 8
    for name, place, wanted in named:
        assert place == ".", name
        assert set(wanted.split(",")) <= extras, name


def test_a_key_struck_while_the_command_loads_ends_it_without_a_traceback() -> None:
    """The default is there before the first of our modules that take time is looked for."""
    script = (
        "import signal, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'branching.cli': print(signal.getsignal(signal.SIGINT).name)\n"
        "sys.meta_path.insert(0, Look())\n"
        "import branching.__main__\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "SIG_DFL\n"


def test_the_command_line_loads_no_layer_before_a_command_runs() -> None:
    """`--help` loads only what it needs."""
    assert layers_after("from branching.cli.app import app") <= {
        *("_caller", "_cancellation", "_exit_codes", "_sanitize", "cli", "errors"),
    }


def files_of_commands() -> set[str]:
    from branching.cli.app import app

    return {each.callback.__module__ for each in app.registered_commands if each.callback}


@pytest.mark.parametrize(
    ("command", "used"),
    [
        ("ls", set()), ("diff", set()), ("status", set()), ("commit", set()), ("abort", set()),
        ("undo", {"history", "show"}), ("create", set()), ("best-of-n", set()),
    ],
)  # fmt: skip
def test_a_command_line_loads_the_file_of_its_own_command_only(
    command: str, used: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHING_NO_CONFIG", "1")
    commands = files_of_commands()
    assert len(commands) > 30
    statement = f"from branching.cli.app import app_for; app_for([{command!r}, 'word'])"
    own = {f"branching.cli.{each.replace('-', '_')}" for each in {command, *used}}
    assert loaded_after(statement) & commands == own


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"]])
def test_the_list_of_commands_and_the_version_load_no_command(words: list[str]) -> None:
    statement = f"from branching.cli.app import app_for; app_for({words!r})"
    assert not loaded_after(statement) & files_of_commands()
