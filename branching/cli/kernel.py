"""`branching kernel`: sessions as a kernel of Jupyter."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from branching.cli.error_handling import UsageFault, handle_errors, note
from branching.cli.options import WorkspaceOption, not_blank

NAME = "branching"


def kernel(
    words: Annotated[
        list[str],
        typer.Argument(metavar="install", help="Register the kernel.", show_default=False),
    ],
    name: Annotated[
        str,
        typer.Option(callback=not_blank, help="Name of the kernel, if you register several."),
    ] = NAME,
    workspace: WorkspaceOption = None,
    for_prefix: Annotated[
        bool,
        typer.Option(
            "--sys-prefix",
            help="Register it in this virtual environment, not for this user.",
        ),
    ] = False,
) -> None:
    """Register a Jupyter kernel whose notebooks fork with their variables and files.

    A cell that begins with %fork 3 creates three children, %pick 1 makes one of them the kernel's
    interpreter, and %commit writes its files to the workspace: the directory of --workspace, by
    default that of the notebook. It needs the extra `jupyter`.

    Example: branching kernel install
    """
    with handle_errors(json=False):
        if words != ["install"]:
            raise UsageFault("write branching kernel install")
        try:
            import ipykernel  # noqa: F401  (the kernel needs it, Jupyter would not say so)
            from jupyter_client.kernelspec import KernelSpecManager
        except ImportError as error:
            raise UsageFault(
                'the kernel needs its extra: pip install ".[jupyter]" in the source tree'
            ) from error
        place = None if workspace is None else workspace.resolve()
        if place is not None and not place.is_dir():
            raise UsageFault(f"--workspace {workspace} is not a directory")
        with tempfile.TemporaryDirectory() as source:
            Path(source, "kernel.json").write_text(json.dumps(specification(name, place), indent=1))
            try:
                written = KernelSpecManager().install_kernel_spec(
                    source,
                    name,
                    user=not for_prefix,
                    prefix=sys.prefix if for_prefix else None,
                )
            except (OSError, ValueError) as error:
                raise UsageFault(f"the kernel was not registered: {error}") from error
        note(f"registered {written}")
        note(f"Hint: choose the kernel {name} in Jupyter; jupyter kernelspec remove {name}")


def specification(name: str, directory: Path | None) -> dict[str, object]:
    """Returns what Jupyter needs to know of the kernel."""
    return {
        "argv": [sys.executable, "-m", "branching.jupyter", "-f", "{connection_file}"],
        "display_name": f"Python ({name})",
        "language": "python",
        "interrupt_mode": "message",
        "env": {} if directory is None else {"BRANCHING_KERNEL_WORKSPACE": str(directory)},
    }
