"""docs/kubernetes.md: what its pod grants is enough for the image, and little in it is idle."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]

from conftest import ROOT
from image_container import run_image

if TYPE_CHECKING:
    from project_snapshot import Project

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
WORK = "echo new >made; chmod 600 made; rm -f Makefile; sleep 600 & kill $!"


def manifest() -> dict[str, Any]:
    """Returns the pod."""
    match = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    assert match
    found: dict[str, Any] = yaml.safe_load(match[1])
    return found


CONTAINER = manifest()["spec"]["containers"][0]
CAPABILITIES: list[str] = CONTAINER["securityContext"]["capabilities"]["add"]


def test_a_timeout_ends_a_command_of_another_user(image: str, project: Project) -> None:
    """What KILL is for, where the first process of the sandbox does not end by itself."""
    flags = {"cap_drop": ["ALL"], "cap_add": CAPABILITIES}
    command = ["run", "--timeout", "1", "--", "sleep", "600"]
    assert run_image(image, *command, project=project, **flags).returncode == 124


def run(image: str, project: Project, capabilities: list[str]) -> int:
    """Returns the exit code of a run that commits, in a container with these capabilities."""
    flags = {"cap_drop": ["ALL"], "cap_add": capabilities}
    return run_image(image, "run", "--", "sh", "-c", WORK, project=project, **flags).returncode


def test_the_pods_capabilities_are_enough(image: str, project: Project) -> None:
    assert CONTAINER["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert run(image, project, CAPABILITIES) == 0
    made = (project.root / "made").stat()
    assert (made.st_uid, made.st_mode & 0o777) == (project.owner, 0o600)


@pytest.mark.parametrize("idle", sorted({*CAPABILITIES} - {"KILL"}))
def test_each_of_them_is_needed(image: str, project: Project, idle: str) -> None:
    assert run(image, project, [name for name in CAPABILITIES if name != idle]) != 0


def test_the_pod_names_what_the_page_explains() -> None:
    assert any(name in PAGE.split("## A pod")[0] for name in CONTAINER["resources"]["limits"])
    assert manifest()["spec"]["hostUsers"] is False
    assert CONTAINER["securityContext"]["appArmorProfile"] == {"type": "Unconfined"}
