"""Containers of the image, from testcontainers: with the documented flags, waited for and removed."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

from testcontainers.core.container import DockerContainer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from project_snapshot import Project

CAPABILITIES = ["SYS_ADMIN"]
DOCUMENTED = {"devices": ["/dev/fuse"], "cap_add": CAPABILITIES, "security_opt": ["apparmor:unconfined"]}
END_SECONDS = 180
PRIVILEGE = ["--cap-add", "SYS_ADMIN"]
UNMASKED = ["--security-opt", "systempaths=unconfined"]


class ImageContainer(DockerContainer):
    """A container that runs a command of the image's entry point, on a project if one is given.

    `flags` replace the documented ones; they have the names of the SDK's `containers.create`.
    """

    def __init__(
        self,
        image: str,
        *command: str,
        project: Project | None = None,
        mode: str = "rw",
        environment: dict[str, str] | None = None,
        **flags: Any,
    ) -> None:
        super().__init__(image, env=environment, **(DOCUMENTED | flags))
        self.with_command(list(command))
        if project:
            self.with_volume_mapping(project.root, "/src", mode)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Waits for the command's end."""
        code = self.get_wrapped_container().wait(timeout=END_SECONDS)["StatusCode"]
        stdout, stderr = self.get_logs()
        return subprocess.CompletedProcess([], code, stdout.decode(), stderr.decode())


def run_image(image: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command of the image to its end; the options are those of `ImageContainer`."""
    with ImageContainer(image, *command, **options) as container:
        return container.finish()


def run_as_owner(
    image: str, *command: str, project: Project, device: str, options: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Runs a command of the image in a container whose user is the project's owner.

    By the docker command: it alone knows `--security-opt systempaths=unconfined`.
    """
    flags = ["--user", f"{project.owner}:{project.owner}", "--device", device, "--security-opt", "apparmor:unconfined"]
    flags += ["--mount", f"type=bind,src={project.root},dst=/src", *options]
    return subprocess.run(
        ["docker", "run", "--rm", *flags, image, *command], capture_output=True, text=True, timeout=END_SECONDS
    )
