"""`branching-docker init`: the files that it writes for a project, and an image that is built from them."""

from __future__ import annotations

import os
import shlex
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from branching_docker.errors import ImageError, WorkspaceError
from branching_docker.image import require_image
from branching_docker.project_image import AGENT_PACKAGES, DOCKERFILE, IGNORE_FILE, SETTINGS_FILE, plan_project_image
from branching_docker.settings import Settings
from conftest import ROOT, WRAPPER

if TYPE_CHECKING:
    from pathlib import Path

    from branching_docker.engine import Engine

BUILD_SECONDS_MAX = 600
OWNER = 1000
FILES = {DOCKERFILE, IGNORE_FILE, SETTINGS_FILE}


def init(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `init` in a directory, without an engine."""
    return subprocess.run(
        [WRAPPER, "init", *words],
        cwd=directory,
        env=os.environ | {"PATH": f"{WRAPPER.parent}:/usr/bin:/bin", "DOCKER_HOST": "unix:///nowhere"},
        capture_output=True,
        text=True,
    )


def dockerfile(directory: Path, *agents: str) -> str:
    """Returns the Dockerfile for a project."""
    return plan_project_image(directory, base="branching", agents=agents).files[DOCKERFILE]


def test_each_language_brings_its_tools_and_no_other(tmp_path: Path) -> None:
    plain = dockerfile(tmp_path)
    assert "COPY" not in plain
    assert not any(word in plain for word in ("python3-venv", "cargo", "nodejs"))
    (tmp_path / "package.json").touch()
    assert "nodejs npm" in dockerfile(tmp_path)
    assert "COPY" not in dockerfile(tmp_path)
    (tmp_path / "Cargo.toml").touch()
    assert "cargo fetch" in dockerfile(tmp_path)
    (tmp_path / "requirements.txt").touch()
    assert "pip install --no-cache-dir -r requirements.txt" in dockerfile(tmp_path)
    assert " -e " not in dockerfile(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    assert "pip install --no-cache-dir -e" in dockerfile(tmp_path)


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ('dev = ["ruff"]\ntests = [\n    "pytest",\n]\n[tool.x]\ntest = 1\n', "--group tests"),
        ('# of all\ndev = ["pytest"]\ndocs = ["sphinx"]\n', "--group dev"),
        ('test = [{include-group = "a"}]\ntests = []\n', "--group test --group tests"),
        ('docs = ["sphinx"]\n', None),
        ("", None),
    ],
    ids=["tests", "dev", "both", "others", "none"],
)
def test_the_dependency_groups_of_the_tests_are_installed(tmp_path: Path, groups: str, options: str | None) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n\n[dependency-groups]\n{groups}')
    assert (f"pip install --no-cache-dir {options} && " in dockerfile(tmp_path)) == (options is not None)
    assert ("--group" in dockerfile(tmp_path)) == (options is not None)


@pytest.mark.parametrize("agent", sorted(AGENT_PACKAGES))
def test_an_agent_brings_node_and_its_package(tmp_path: Path, agent: str) -> None:
    text = dockerfile(tmp_path, agent)
    assert f"npm install -g {AGENT_PACKAGES[agent]}\n" in text
    assert "nodejs npm" in text


def test_the_images_name_is_one_that_docker_accepts(tmp_path: Path) -> None:
    names = []
    for name in ("My Project_2", "été", "日本"):
        (tmp_path / name).mkdir()
        names.append(plan_project_image(tmp_path / name, base="branching", agents=()).name)
    assert names == ["branching-my-project-2", "branching-t", "branching-project"]


def test_the_hint_of_a_missing_image_of_a_project_is_how_to_build_it(tmp_path: Path) -> None:
    planned = plan_project_image(tmp_path, base="branching", agents=())
    engine = cast("Engine", SimpleNamespace(command="docker", image_labels=lambda _: None))
    for settings in (Settings(image=planned.name), Settings()):
        with pytest.raises(ImageError) as refused:
            require_image(engine, settings, tmp_path)
        assert str(refused.value.hint).startswith("branching-docker build, or")
    planned.write()
    with pytest.raises(ImageError) as refused:
        require_image(engine, Settings(image=planned.name), tmp_path)
    assert refused.value.hint == planned.next_steps("docker")[0]


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run([WRAPPER, "--dry-run", "init"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"# {name}\n" in done.stdout for name in FILES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_exists_is_not_replaced_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("# mine\n")
    done = init(tmp_path)
    assert done.returncode == 125
    assert f"{name} exists, and was not changed" in done.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "# mine\n"}


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    planned = plan_project_image(tmp_path, base="branching", agents=())
    planned.files["missing/file"] = ""
    with pytest.raises(WorkspaceError, match="could not be written"):
        planned.write()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_agent_is_a_usage_error(tmp_path: Path) -> None:
    done = init(tmp_path, "--agent", "nobody")
    assert done.returncode == 2
    assert "choose one of claude" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(900)
def test_a_python_projects_tests_run_in_its_image(image: str, tmp_path: Path) -> None:
    """The project is installed editable: a branch's own source is imported."""
    project = tmp_path / f"greet-{os.getpid()}"
    (project / "src" / "greet").mkdir(parents=True)
    (project / "src" / "greet" / "__init__.py").write_text('HELLO = "hello"\n')
    (project / "test_greet.py").write_text("from greet import HELLO\n\ndef test_it():\n    assert HELLO == 'changed'\n")
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=61"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "greet"\nversion = "1"\n'
    )
    for path in (project, *project.rglob("*")):
        os.chown(path, OWNER, OWNER)
    done = subprocess.run([WRAPPER, "--image", image, "init"], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in project.iterdir()} >= FILES
    build, run = done.stdout.splitlines()
    shown = (ROOT / "docs" / "image.md").read_text().partition("branching-docker init\n")[2].partition("```")[0]
    printed = (done.stderr + done.stdout).replace(str(project), "/home/me/greet").replace(project.name, "greet")
    assert printed == shown
    name = shlex.split(build)[3]
    try:
        subprocess.run(shlex.split(build), check=True, capture_output=True, timeout=BUILD_SECONDS_MAX)
        command = "sed -i s/hello/changed/ src/greet/__init__.py && pytest -q -p no:cacheprovider"
        words = [WRAPPER if word == "branching-docker" else word for word in shlex.split(run.removesuffix("CMD"))]
        ran = subprocess.run([*words, "sh", "-c", command], capture_output=True, text=True, timeout=180)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert (project / "src" / "greet" / "__init__.py").read_text() == 'HELLO = "changed"\n'
    finally:
        subprocess.run(["docker", "image", "rm", name], capture_output=True, timeout=180)
