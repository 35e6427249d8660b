"""Merging the winner's files into the parent: planned, staged, then committed all or nothing."""
