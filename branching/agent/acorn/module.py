"""A module: a class that defines an agent, its input and its output.

An instance can run several times, each time with a new conversation. A branch is an instance that
its parent's run creates as a fork with one branch; the parent waits for it. Branches that the model
starts in one step run concurrently, unless they change files.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from branching._threads import run_in_loop
from branching.agent.acorn.module_run import ModuleRun
from branching.agent.acorn.result_text import Merge
from branching.agent.acorn.tools import own_tools
from branching.agent.budget import UnknownPrice
from branching.agent.pydantic_ai.pricing import Price, listed_price
from branching.fs import Branch, Workspace

MAX_STEPS = 50


class Module:
    """A kind of agent. Subclass it; the docstring says what it does, to its model and its parent.

    `place` is where it works: a workspace or a branch, for branches with files of their own.
    """

    model: ClassVar[Any] = None
    """A model of pydantic-ai, or its name; a branch without one uses its parent's."""
    temperature: ClassVar[float | None] = None
    max_steps: ClassVar[int] = MAX_STEPS
    """Requests to the model in one run."""
    system_prompt: ClassVar[str | None] = None
    """The system prompt. Default: the docstring."""
    initial_input: ClassVar[type[BaseModel] | None] = None
    final_output: ClassVar[type[BaseModel] | None] = None
    """What a run must end with. Without it a run ends with a text, and a branch is summarized."""
    tools: ClassVar[Sequence[Any]] = ()
    """Functions that are tools beside the methods marked with `tool`."""
    branches: ClassVar[list[type[Module]]] = []
    """The kinds that the model may send off."""
    workspace: ClassVar[Literal["shared", "branch"]] = "shared"
    """As a branch: whether it works in its parent's files, or in a copy that is merged."""
    scope: ClassVar[Literal["all", "immediate"]] = "all"
    """Whose tools `call_parent_tool` has: those of all levels above, or of the parent alone."""

    def __init__(
        self,
        *,
        model: Any = None,
        place: Workspace | Branch | None = None,
        price: Price = listed_price,
        budget_usd: float | None = None,
        unknown_price: UnknownPrice = "refuse",
    ) -> None:
        """`budget_usd` is for each branch and those below it."""
        if not isinstance(type(self).branches, list):
            raise TypeError("branches must be a list of Module classes")
        for kind in type(self).branches:
            if not (isinstance(kind, type) and issubclass(kind, Module)):
                raise TypeError(f"branches must be a list of Module classes, and has {kind!r}")
        names = [kind.__name__ for kind in type(self).branches]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise TypeError(f"branches must differ in name: {repeated[0]} is used twice")
        self.place = place
        self.price = price
        self.budget_usd = budget_usd
        self.unknown_price: UnknownPrice = unknown_price
        self._model = model
        self._run: ModuleRun | None = None
        own_tools(self)  # names that cannot be are found before anything runs

    @classmethod
    def description(cls) -> str:
        """The description from the class's own docstring, "" if it has none."""
        return inspect.cleandoc(cls.__dict__.get("__doc__") or "")

    @property
    def chosen_model(self) -> Any:
        """The model that it runs on; None is its parent's. A name of the form `provider/model` is
        the one that pydantic-ai calls `provider:model`."""
        model = self._model or type(self).model
        if isinstance(model, str) and ":" not in model:
            return model.replace("/", ":", 1)
        return model

    @property
    def path(self) -> Path | None:
        """The directory that its run works in; None without a place."""
        return None if self._run is None else self._run.path

    @property
    def history(self) -> list[Any]:
        """A copy of the conversation of its current or last run.

        What `on_step` or a tool appends is part of the next request: messages of pydantic-ai,
        texts of the user, and dicts with `role` and `content`.
        """
        return [] if self._run is None else self._run.shown_history()

    def __call__(self, **inputs: Any) -> Any:
        """Runs it to its end; in async code, `await module.run(...)`."""
        return asyncio.run(self.run(**inputs))

    async def run(self, **inputs: Any) -> Any:
        """Runs it; returns the `final_output`, or the text that it ended with.

        Raises pydantic's ValidationError for inputs that do not fit, and what the model's library
        raises.
        """
        return await self._begun(None).to_end(inputs)

    def branch(
        self, kind: type[Module], /, merge: Merge = "end_result", **inputs: Any
    ) -> Awaitable[BaseModel | None] | BaseModel | None:
        """Runs a branch from a tool or a callback of this module, and waits for its result.

        In async code, await the call. A synchronous tool or callback, which runs in a thread, gets
        the result directly. The result is also added to the conversation as `[Branch Result]`. The
        class need not be in `branches`.

        Returns:
            The branch's `final_output`, None if it has none.

        Raises:
            BranchError: The branch has failed.
            ValueError: `merge` has an unknown value.
        """
        if self._run is None:
            raise RuntimeError("a branch begins in a run: call this from a tool or a callback")
        work = self._run.branch_of(kind, merge, inputs)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run_in_loop(self._run.loop, work)
        return work

    def on_step(self, step: Any) -> Any:
        """Is called after each step: an answer of the model, whose tools have run. May be async.

        Args:
            step: The answer, pydantic-ai's ModelResponse, with `tool_results`: the parts that the
                tools returned.
        """

    def _begun(self, parent: ModuleRun | None) -> ModuleRun:
        self._run = ModuleRun(self, parent)
        return self._run
