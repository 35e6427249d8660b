"""Finds, checks and builds the image."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from branching_docker import __version__
from branching_docker.constants import VERSION_LABEL
from branching_docker.errors import ImageError
from branching_docker.project_image import DOCKERFILE, project_image_build
from branching_docker.settings import IMAGE_DEFAULT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from branching_docker.engine import Engine
    from branching_docker.settings import Settings


def warn_of_version(image: str, labels: dict[str, str]) -> None:
    """Warns on standard error if the image was built for another version of the wrapper."""
    theirs = labels.get(VERSION_LABEL)
    if theirs != __version__:
        typer.echo(
            f'branching-docker: warning: this is version {__version__}, the image "{image}" has {theirs or "none"}. '
            "branching-docker build makes a matching image.",
            err=True,
        )


def require_image(engine: Engine, settings: Settings, workspace: Path) -> None:
    """Checks that the engine has the image or may pull it; warns if it is of another version.

    The hint of the error names the Dockerfile that `init` wrote for the workspace, if there is one.

    Raises:
        ImageError: the image is missing and may not be pulled."""
    labels = engine.image_labels(settings.image)
    if labels is not None:
        warn_of_version(settings.image, labels)
    elif settings.pull == "never":
        hint = f"branching-docker build, or docker pull {settings.image}, or name another by BRANCHING_IMAGE"
        if settings.image != IMAGE_DEFAULT and (workspace / DOCKERFILE).is_file():
            hint = project_image_build(settings.engine or "docker", settings.image, workspace)
        raise ImageError(f'the image "{settings.image}" is not on this machine.', hint=hint)


def build_context(source: Path | None) -> Path:
    """Returns the directory to build from: `source`, the current source tree, or the one that the wheel brought."""
    here, packaged = Path.cwd(), Path(__file__).parent / "context"
    if source is not None:
        return source.absolute()
    return here if (here / "branchfs" / "Cargo.toml").is_file() or not packaged.is_dir() else packaged


def build(engine: Engine, source: Path, image: str, *, environ: Mapping[str, str]) -> None:
    """Builds the image from a source tree, on the base image that the tree's own script finds or makes.

    Raises:
        EngineError: the engine does not answer.
        ImageError: the image was not built; an earlier image of that name stays.
    """
    if not (source / "Dockerfile").is_file():
        raise ImageError(f"{source} has no Dockerfile.", hint="give the source tree: branching-docker build DIR")
    base = subprocess.run(
        [source / "scripts" / "base-image"],
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "CONTAINER_ENGINE": engine.command},
        check=False,
    )
    if base.returncode != 0:
        raise ImageError("no base image is available (the reason is above).", hint="follow the hint above")
    engine.build(source, image, {"BASE_IMAGE": base.stdout.strip(), "BRANCHING_NAME": image})
    engine.drop_superseded(image)
