"""Every kind of work, in the order of the report."""

from __future__ import annotations

from ..field.race import Workload
from .branches import COMMITS, CREATE, DEPTH, WIDTH
from .data import DATA
from .jobs import CARGO, PYTEST
from .reading import READING
from .writing import WRITING

ALL: list[Workload] = [CREATE, READING, WRITING, DATA, COMMITS, WIDTH, DEPTH, CARGO, PYTEST]
