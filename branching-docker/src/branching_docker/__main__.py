"""`branching-docker`, also as `python -m branching_docker`."""

from __future__ import annotations

from branching_docker.cli import app


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    app(prog_name="branching-docker")


if __name__ == "__main__":
    main()
