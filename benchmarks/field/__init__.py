"""What all benchmarks share: sizes, figures, the race, and the report."""
