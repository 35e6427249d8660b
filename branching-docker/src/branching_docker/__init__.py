"""Runs the `branching` command on a directory of the host, inside a container.

errors             what can go wrong, each with its hint
constants          names that the host, the engine and the image share
engine_info        what a plan must know about the engine
fingerprint        fingerprints of the configuration files and the directory
settings           flags, environment and configuration files to one set of settings
docker_context     the engine that the docker command would use
engine             Docker or Podman: queries, life cycle, build and pull
store_volume       the volume that holds a directory's branches
plan               pure: settings to a frozen container plan, and the exact docker command
recovery           settles a commit whose container was killed
container_run      an attached run, with the watcher that ends its container
warm_container     a container that stays, one for a directory
warm_exec          a command in a warm container
engine_api         its streams over the engine's socket, without the SDK
fast_path          the same for a plain command line, without Typer
image              whether the image is there, its version, its build
doctor             checks the engine, the image and the directory
options, commands  the global options, and the names of commands
cli                the command line
"""

__version__ = "0.2.0"
