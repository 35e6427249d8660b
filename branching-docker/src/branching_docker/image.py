"""The image: whether it is there, and of which version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from branching_docker import __version__
from branching_docker.errors import ImageError, WrapperError
from branching_docker.front import connect
from branching_docker.names import VERSION_LABEL

if TYPE_CHECKING:
    from branching_docker.engine import Engine
    from branching_docker.front import Given
    from branching_docker.settings import Settings


def show_versions(given: Given) -> None:
    """Prints our version, and the image's where there is one to ask."""
    typer.echo(f"branching-docker {__version__}")
    try:
        settings = given.settings()
        labels = connect(settings).image_labels(settings.image)
    except WrapperError:
        return  # without an engine there is no image either
    if labels is not None:
        typer.echo(f"image {settings.image} {labels.get(VERSION_LABEL, 'of unknown version')}")
        warn_of_version(settings.image, labels)


def warn_of_version(image: str, labels: dict[str, str]) -> None:
    """Says on standard error when the image was made for another version of us."""
    theirs = labels.get(VERSION_LABEL)
    if theirs != __version__:
        typer.echo(
            f'branching-docker: warning: this is version {__version__}, the image "{image}" has {theirs or "none"}. '
            "branching-docker build makes the image that fits.",
            err=True,
        )


def require_image(at: Engine, settings: Settings) -> None:
    """Returns if the engine has the image, or may pull it; warns of one that is not of our version."""
    labels = at.image_labels(settings.image)
    if labels is not None:
        warn_of_version(settings.image, labels)
    elif settings.pull == "never":
        raise ImageError(
            f'the image "{settings.image}" is not on this machine.',
            hint=f"branching-docker build, or docker pull {settings.image}, or name another by BRANCHING_IMAGE",
        )
