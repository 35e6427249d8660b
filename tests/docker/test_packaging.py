"""The distributions as a release makes them: built from source archives, installed in empty environments, run there."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from branching_docker import __version__
from conftest import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS_MAX = 500
OLDEST = (3, 10)
DISTRIBUTIONS = {"branching_workspaces": ROOT, "branching_docker": ROOT / "branching-docker"}


def interpreters() -> list[str]:
    """Returns a Python of each version that we promise and this machine has."""
    installed = Path.home() / ".pyenv" / "versions"
    # First, since pyenv's own entries on PATH are there for versions that are not chosen too.
    search = os.pathsep.join([*(str(path / "bin") for path in installed.glob("3.*")), os.environ["PATH"]])
    names = [f"python3.{minor}" for minor in range(OLDEST[1], sys.version_info.minor + 4)]
    found = [shutil.which(name, path=search) for name in names]
    return [path for path in found if path] or [sys.executable]


def run(*words: str | Path, cwd: Path | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """Runs a command and returns what it says. Of our own sources it knows nothing, or they would be what is tested."""
    environ = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, cwd=cwd, env=environ)
    assert done.returncode == 0, f"{words}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a source archive of each distribution, and the wheel that was built from it."""
    place = tmp_path_factory.mktemp("dist")
    for source in DISTRIBUTIONS.values():
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", place, source)
    return place


@pytest.fixture
def environment(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An empty environment of the Python that the test names."""
    run(request.param, "-m", "venv", "--without-pip", tmp_path / "env")
    return tmp_path / "env" / "bin"


def test_the_version_is_one() -> None:
    """Each distribution says it once; these are the places."""
    places = {
        "branching/__init__.py": r'^__version__ = "(.*)"',
        "branchfs/Cargo.toml": r'^version = "(.*)"',
        "branchfs/Cargo.lock": r'^name = "branchfs"\nversion = "(.*)"',
        "devcontainer/branching/devcontainer-feature.json": r'"version": "(.*)"',
        "Dockerfile": r'org\.opencontainers\.image\.version="(.*?)"',
    }
    for place, pattern in places.items():
        found = re.search(pattern, (ROOT / place).read_text(), re.MULTILINE)
        assert found, place
        assert found.group(1) == __version__, place


@pytest.mark.parametrize("environment", interpreters(), indirect=True, ids=os.path.basename)
def test_the_library_installs_alone_and_imports(built: Path, environment: Path) -> None:
    wheel = next(built.glob("branching_workspaces-*.whl"))
    run(sys.executable, "-m", "pip", "--python", environment / "python", "install", "-q", "--no-index", wheel)
    program = "import branching, branching.fs; print(branching.__version__, branching.Speculate.__name__)"
    assert run(environment / "python", "-c", program) == f"{__version__} Speculate\n"


@pytest.mark.parametrize("environment", interpreters()[:1], indirect=True, ids=os.path.basename)
@pytest.mark.parametrize("source", ["tree", "wheel"])
def test_an_extra_installs_from_the_source_tree_and_from_a_wheel(
    built: Path, environment: Path, source: str, tmp_path: Path
) -> None:
    """In the form that hints name: ".[cli]" in the source tree; a wheel takes the extra in brackets after its path."""
    with tarfile.open(next(built.glob("branching_workspaces-*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.glob("branching_workspaces-*")
    told = (tree / "branching" / "cli" / "__init__.py").read_text()
    found = re.search(r'pip install "(.*)" in the source tree', told)
    assert found
    wanted = found[1] if source == "tree" else f"{next(built.glob('branching_workspaces-*.whl'))}[cli]"
    run(sys.executable, "-m", "pip", "--python", environment / "python", "install", "-q", wanted, cwd=tree)
    assert "speculate" in run(environment / "branching", "--help", cwd=environment)
    whose = "import importlib.metadata as m; print(*sorted(map(str, m.files('branching-workspaces'))))"
    assert "branching/__init__.py" in run(environment / "python", "-c", whose, cwd=environment).split()


@pytest.mark.parametrize("environment", interpreters()[:1], indirect=True, ids=os.path.basename)
def test_the_wrapper_installs_with_what_it_needs_and_brings_the_images_sources(built: Path, environment: Path) -> None:
    """On the oldest Python there is, which needs most."""
    wheel = next(built.glob("branching_docker-*.whl"))
    run(sys.executable, "-m", "pip", "--python", environment / "python", "install", "-q", wheel)
    told = run(environment / "branching-docker", "-w", environment, "--dry-run", "run", "true")
    assert told.startswith("docker run --rm --init ")
    where = "from branching_docker import image; print(image.build_context(None))"
    context = Path(run(environment / "python", "-c", where, cwd=environment).strip())
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (context / "Dockerfile").read_text(), re.MULTILINE)
    missing = [name for names in copied for name in names.split() if not (context / name).exists()]
    assert missing == []
    assert os.access(context / "scripts" / "base-image", os.X_OK)


def test_archives_hold_what_a_rebuild_needs_and_nothing_of_this_machine(built: Path) -> None:
    archives = {}
    for path in built.glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            archives[path] = archive.getnames()
    for path in built.glob("*.whl"):
        with zipfile.ZipFile(path) as archive:
            archives[path] = archive.namelist()
    assert len(archives) == 2 * len(DISTRIBUTIONS)
    for path, names in archives.items():
        stray = [name for name in names if re.search(r"__pycache__|\.pyc$|/target/|\.venv|\.git/|\.pytest_cache", name)]
        assert stray == [], path
    assert any(name.endswith("py.typed") for names in archives.values() for name in names)


def _program() -> Path:
    """The program that is compiled: by scripts/test, or by hand."""
    return Path(os.environ.get("BRANCHFS", ROOT / "branchfs/target/debug/branchfs"))


def _programs_of_tests(place: str, names: list[str]) -> list[str]:
    """Names what cargo does not need to see that the program is compiled, and what is large."""
    return [name for name in names if name == "incremental" or (place.endswith("/deps") and "." not in name)]


def test_branchfs_is_a_wheel_whose_program_mounts(tmp_path: Path) -> None:
    """As `pip install ./branchfs` makes it. What scripts/test has compiled before is not compiled again.

    It is compiled in a copy of the target directory: cargo removes a program before it links it again, and other tests
    run the one in the source tree.
    """
    target = tmp_path / "target"
    built = _program().parent
    shutil.copytree(built, target / built.name, symlinks=True, ignore=_programs_of_tests)
    beside = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CARGO_TARGET_DIR": str(target),
        "MATURIN_PEP517_ARGS": f"--profile {'dev' if built.name == 'debug' else built.name}",
    }
    pip: list[str | Path] = [sys.executable, "-m", "pip"]
    options = ("-q", "--no-index", "--no-deps", "--no-build-isolation")
    run(*pip, "wheel", *options, "--wheel-dir", tmp_path, ROOT / "branchfs", environ=beside)
    (wheel,) = tmp_path.glob("branchfs-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (
            email.message_from_bytes(archive.read(name)) for name in archive.namelist() if name.endswith("/METADATA")
        )
    assert (metadata["Name"], metadata["Version"], metadata["License"]) == ("branchfs", __version__, "Apache-2.0")
    assert "-py3-none-" in wheel.name, "a program, for any Python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    run(*pip, "--python", tmp_path / "env/bin/python", "install", "-q", "--no-index", wheel)
    program, base, mounted = tmp_path / "env/bin/branchfs", tmp_path / "base", tmp_path / "mounted"
    assert run(program, "--version") == f"branchfs {__version__}\n"
    base.mkdir()
    (base / "file").write_text("as it was\n")
    mounted.mkdir()
    run(program, "mount", "--base", base, mounted)
    try:
        assert (mounted / "file").read_text() == "as it was\n"
    finally:
        run(program, "unmount", mounted)


FEATURE = ROOT / "devcontainer" / "branching"


@pytest.fixture
def feature(tmp_path: Path) -> Path:
    """The feature for dev containers, in a directory of its own."""
    return shutil.copytree(FEATURE, tmp_path / "branching", ignore=shutil.ignore_patterns("*.whl"))


def install(feature: Path, prefix: Path, extras: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"EXTRAS": extras, "PIP_NO_INDEX": "1"}
    return subprocess.run(
        [feature / "install.sh", prefix], env=environ, capture_output=True, text=True, timeout=SECONDS_MAX
    )


def program_wheel(place: Path) -> Path:
    """Makes a wheel of branchfs of the program that is compiled; another test has one of `pip wheel ./branchfs`."""
    path = place / f"branchfs-{__version__}-py3-none-any.whl"
    facts = f"branchfs-{__version__}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(_program(), f"branchfs-{__version__}.data/scripts/branchfs")
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: branchfs\nVersion: {__version__}\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    return path


def test_the_feature_for_dev_containers_installs_both_programs_offline(
    built: Path, feature: Path, tmp_path: Path
) -> None:
    """Without extras: their packages are not among the wheels."""
    shutil.copy(next(built.glob("branching_workspaces-*.whl")), feature)
    program_wheel(feature)
    done = install(feature, tmp_path / "prefix", "")
    assert done.returncode == 0, done.stderr
    programs = tmp_path / "prefix" / "bin"
    assert run(programs / "branchfs", "--version") == f"branchfs {__version__}\n"
    entry_point = Path(json.loads((FEATURE / "devcontainer-feature.json").read_text())["entrypoint"])
    start = tmp_path / "prefix" / entry_point.relative_to("/usr/local")
    os.mknod(tmp_path / "fuse", mode=stat.S_IFCHR | 0o600, device=os.makedev(10, 229))
    mounted = 'mount --bind "$1" /dev/fuse && "$2" stat -c %a /dev/fuse'  # not the machine's own device
    shown = run("unshare", "--mount", "sh", "-c", mounted, "sh", tmp_path / "fuse", start)
    assert shown == "666\n"
    python = programs.parent / "lib/branching/bin/python"
    assert run(python, "-c", "import branching; print(branching.__version__)", cwd=tmp_path) == f"{__version__}\n"
    needs_extra = subprocess.run([programs / "branching"], capture_output=True, text=True, cwd=tmp_path)
    assert "pip install" in needs_extra.stderr
    assert ".[cli]" in needs_extra.stderr


def test_the_feature_without_wheels_says_how_they_are_made(feature: Path, tmp_path: Path) -> None:
    done = install(feature, tmp_path / "prefix", "")
    assert done.returncode == 1
    assert f"Hint: pip wheel --no-deps -w {feature} . ./branchfs" in done.stderr
    assert not (tmp_path / "prefix").exists()


def test_the_feature_has_the_rights_and_the_extras_that_exist() -> None:
    described = json.loads((FEATURE / "devcontainer-feature.json").read_text())
    assert described["id"] == FEATURE.name
    options = described["options"]
    assert {name.upper() for name in options} == {"EXTRAS"}
    extras = re.findall(r"^(\w[\w-]*) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(options["extras"]["default"].split(",")) <= set(extras)
    page = (ROOT / "README.md").read_text() + (ROOT / "docs" / "image.md").read_text().replace("\n", " ")
    rights = [f"--cap-add {name}" for name in described["capAdd"]]
    assert all(words in page for words in [*rights, *(f"--security-opt {name}" for name in described["securityOpt"])])
