"""Support for tests: real and fake mounts, and the search for leftover processes."""
