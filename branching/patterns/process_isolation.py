"""Runs function candidates in separate processes, for `isolate_processes` and resource limits.

A BranchContext runs each function in the same sandbox as commands, at the workspace's own path.
Like commands, the functions end when they are cancelled, and the call waits for this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branching.errors import ProcessBranchError
from branching.patterns.attempt import Task
from branching.runlog.run_controller import RunController

if TYPE_CHECKING:
    from collections.abc import Mapping

    from branching.process import Isolation


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    """Isolation options of a function's process; see `BranchContext`."""

    isolation: Isolation = "sandbox"
    network: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    clean_env: bool = False
    hide: Sequence[str] = ()

    def __post_init__(self) -> None:
        from branching.process import validate_isolation

        validate_isolation(self.isolation, network=self.network, hide=self.hide)


def isolated(
    function: Callable[..., object], isolation_options: IsolationOptions
) -> Callable[..., object]:
    """Wraps `function(path, ...)` to run in a separate process.

    The wrapper must be called in a task. It reports the function's output line by line, and returns
    or raises what the function does. It raises ProcessBranchError if the process ended otherwise;
    `limit` then names the limit that it exceeded.
    """

    def call(_: Path, *arguments: object) -> Any:
        task = Task.of_caller()
        assert task is not None, "candidates and the setup run in tasks"
        return _call(function, isolation_options, task, arguments)

    call.ends_when_cancelled = True  # type: ignore[attr-defined]
    return call


def _call(
    function: Callable[..., object],
    isolation_options: IsolationOptions,
    task: Task,
    arguments: Sequence[object],
) -> Any:
    from branching.patterns.command_candidate import BlockSplitter, refusals_from_now
    from branching.process import BranchContext

    budget = task.attempt.budget
    lines = BlockSplitter(task.say)
    context = BranchContext(
        function,
        task.attempt.path,
        arguments=arguments,
        limits=None
        if budget is None
        else replace(budget.limits, disk=None, wall_time=budget.wall_seconds),
        parent_cgroup=None if budget is None else budget.group,
        isolation=isolation_options.isolation,
        network=isolation_options.network,
        clean_env=isolation_options.clean_env,
        hide=isolation_options.hide,
        env={
            **isolation_options.env,
            "BRANCHING_BRANCH": task.attempt.branch.name,
            "BRANCHING_ATTEMPT": str(task.attempt.index),
        },
        stdout=lines.feed,
        stderr=lines.feed,
        disk_refusals=refusals_from_now(task.attempt.branch, budget),
    )
    task.on_cancel(context.kill)
    controller = RunController.current()
    name = task.attempt.branch.name
    try:
        with (
            context,
            nullcontext() if controller is None else controller.controlling(name, context, None),
        ):
            try:
                context.wait()
            except ProcessBranchError:
                pass  # the result has more details
            result = context.result
    finally:
        task.forget(context.kill)
        lines.finish()
    task.ended = result
    if result.exception is not None:
        raise result.exception
    if not result.success:
        raise ProcessBranchError(
            f"the candidate's process did not end by itself: {task.ended.reason}",
            limit=_LIMIT_OF.get(task.ended.how),
        )
    return result.value


_LIMIT_OF = {"oom": "memory", "timeout": "wall_time", "pids": "pids", "disk": "disk"}
