"""A SWE-ReX deployment whose commands run in a branch. Requires the extra `swerex`.

    with Workspace.open("project") as workspace, workspace.branch("attempt") as branch:
        deployment = BranchDeployment(branch)
        await deployment.start()
        await deployment.runtime.execute(Command(command="make test", shell=True))
        await deployment.stop()

The server of SWE-ReX runs in the sandbox of the branch, with the shells and commands that it
starts. The runtime is the client of SWE-ReX:

    RemoteRuntime ── HTTP, 127.0.0.1 ── sandbox of the branch: server ── shells, commands

Ending the deployment ends all of them, and leaves the branch open: its `with` commits or aborts it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

try:
    from swerex.deployment.abstract import AbstractDeployment
    from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
    from swerex.exceptions import DeploymentNotStartedError
    from swerex.runtime.abstract import IsAliveResponse
    from swerex.runtime.remote import RemoteRuntime
    from swerex.utils.free_port import find_free_port
    from swerex.utils.log import get_logger
except ImportError as error:
    raise ImportError(
        'branching.swerex needs its extra: pip install ".[swerex]" in the source tree'
    ) from error

from branching.errors import ProcessBranchError
from branching.fs import Branch
from branching.process import BranchContext, ResourceLimits

HOST = "127.0.0.1"
TOKEN = "SWE_REX_TOKEN"
"""The variable that gives the server its token. A command line could be read by other users."""
SERVER = f"""
import os, sys
sys.path = [path for path in sys.path if path]  # not the modules of the project
from swerex.server import main
sys.argv += ["--auth-token=" + os.environ.pop("{TOKEN}")]  # one word: a token may begin with "-"
main()
"""
TERMINAL = {"TERM": "dumb"}
"""On another terminal, bash adds control characters to the output of each command."""
POLL_SECONDS = 0.1
ANSWER_SECONDS_MAX = 5.0
"""How long the server may take to say that it is alive: it answers nothing while a command runs."""
OUTPUT_BYTES_MAX = 2000
"""Of what the server printed, its end is part of the message."""


class BranchDeployment(AbstractDeployment):
    """Runs the commands of an agent that uses SWE-ReX in a branch.

    Args:
        branch: An open branch. It cannot be committed between `start` and `stop`.
        python: The interpreter of the server, with the package `swe-rex`. Default: this one.
        startup_timeout: Seconds to wait for the server in `start`.
        limits: Resource limits of the server and all commands together.
        seen_at: The path at which commands see the branch. Default: the path of the workspace.
        hide: Glob patterns of files that commands cannot read.
        env: Variables to add to the environment.
        clean_env: Start with an almost empty environment.
        logger: Default: that of SWE-ReX.
    """

    def __init__(
        self,
        branch: Branch,
        *,
        python: str = sys.executable,
        startup_timeout: float = 60.0,
        limits: ResourceLimits | None = None,
        seen_at: str | os.PathLike[str] | None = None,
        hide: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        clean_env: bool = False,
        logger: logging.Logger | None = None,
    ) -> None:
        self.logger = logger or get_logger("rex-deploy")
        self._branch = branch
        self._python = python
        self._startup_timeout = startup_timeout
        self._limits = limits
        self._seen_at = seen_at or branch.seen_at
        self._hide = tuple(hide)
        self._env = dict(env or {})
        self._clean_env = clean_env
        self._hooks = CombinedDeploymentHook()
        self._server: BranchContext | None = None
        self._runtime: RemoteRuntime | None = None
        self._stack = AsyncExitStack()

    def add_hook(self, hook: DeploymentHook) -> None:
        """Adds a function that is called with the steps of `start`."""
        self._hooks.add_hook(hook)

    @property
    def runtime(self) -> RemoteRuntime:
        """The runtime. Raises DeploymentNotStartedError if the deployment is not started."""
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        """Asks the server. Raises DeploymentNotStartedError if the deployment is not started."""
        runtime = self.runtime
        if self._server is not None and not self._server.alive:
            reason = f"the SWE-ReX server has ended: {self._server.result.reason}"
            return IsAliveResponse(is_alive=False, message=reason)
        return await runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        """Starts the server in the sandbox of the branch, and waits until it answers.

        Raises:
            ProcessBranchError: The server was started before, or it did not answer in time.
        """
        if self._runtime is not None:
            raise ProcessBranchError("the deployment is started; stop it first")
        self._hooks.on_custom_step("Starting the SWE-ReX server in the branch")
        port, token = find_free_port(), secrets.token_urlsafe()
        async with AsyncExitStack() as stack:
            output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            server = BranchContext(
                [self._python, "-c", SERVER, "--host", HOST, "--port", str(port)],
                self._branch,
                stdout=output.fileno(),
                stderr=output.fileno(),
                limits=self._limits,
                seen_at=self._seen_at,
                hide=self._hide,
                env={**TERMINAL, **self._env, TOKEN: token},
                clean_env=self._clean_env,
            )
            await stack.enter_async_context(server)
            runtime = RemoteRuntime(
                host=f"http://{HOST}",
                port=port,
                auth_token=token,
                timeout=ANSWER_SECONDS_MAX,
                logger=self.logger,
            )
            deadline = time.monotonic() + self._startup_timeout
            while not (server.alive and await runtime.is_alive()):
                if not server.alive or time.monotonic() > deadline:
                    output.seek(0)
                    printed = output.read()[-OUTPUT_BYTES_MAX:].decode(errors="replace")
                    raise ProcessBranchError(
                        f"the SWE-ReX server did not start in branch {self._branch.name!r}; "
                        f"the end of its output:\n{printed.strip()}"
                    )
                await asyncio.sleep(POLL_SECONDS)
            self._server, self._runtime = server, runtime
            self._stack = stack.pop_all()

    async def stop(self) -> None:
        """Ends the server with all that runs in the sandbox. Does nothing if it is not started."""
        self._server = self._runtime = None
        await self._stack.aclose()
