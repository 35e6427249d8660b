"""How fast branches are, beside the field: `scripts/bench`, and docs/benchmarks.md for its reading.

    field/         what is common to all: sizes, figures, the race, the report and its picture
    contestants/   one file for each way to branch a directory; each says what it cannot do
    workloads/     one file for each kind of work, done alike in everybody's branch

Beside it stand two small ones: requests.py counts what the kernel asks the fuse driver, whatever
the load, and latency.py how long a race takes to end.

Standard library only. Nothing in here knows which contestant is ours.
"""
