"""`python -m branching` is the `branching` command."""

from __future__ import annotations

from branching.cli import main

if __name__ == "__main__":
    main()
