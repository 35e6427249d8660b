"""Runs the `branching` command on a directory of the host, inside a container.

errors      what can go wrong, each with its hint
names       what the host, the engine and the image call the same
facts       what a plan must know of the engine
stamp       which configuration files there are
settings    flags, environment and configuration files to one set of settings
store       where a directory's branches are
plan        pure: settings to a frozen container plan, and the exact docker command
endpoint    which engine is meant
api         questions to Docker over its socket
engine      Docker or Podman: what is there, and the deeds that are its command's
warm        a container that stays, one for a directory
entry       a command in a warm container
attach      its streams, over the engine's socket
quick       the short way there
doctor      what stands between a user and a command that works
cli         the command line
"""

__version__ = "0.2.0"
