"""The test of the project: `make test` runs it."""

import sys

from stats import mean

if mean([1, 2]) != 1.5:
    sys.exit(f"FAIL: mean([1, 2]) is {mean([1, 2])}, not 1.5")
print("ok: mean([1, 2]) is 1.5")
