"""Runs the `branching` command on a directory of the host, inside a container.

errors      what can go wrong, each with its hint
plan        pure: arguments and environment to a frozen container plan, and the exact docker command
engine      the only module that talks to Docker
cli         the command line
"""

__version__ = "0.2.0"
