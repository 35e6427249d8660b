"""Agents in the manner of Acorn, and their branches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_ai import ModelRetry
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse
from pydantic_ai.models.function import AgentInfo, FunctionModel

from branching import Workspace
from branching.agent.acorn import BranchError, Module, tool

from .scripted import call, prompts, returned, say

Step = ModelResponse | Callable[[list[ModelMessage]], ModelResponse]


class Topic(BaseModel):
    subject: str = Field(description="what to look at")
    depth: int = 1


class Answer(BaseModel):
    text: str
    score: float = 1.0


def finish(text: str = "found", score: float = 1.0) -> ModelResponse:
    return call("__finish__", text=text, score=score)


class Scripted:
    """A model that answers with one step each time, and keeps the requests and the tools."""

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.seen: list[list[ModelMessage]] = []
        self.tools: list[set[str]] = []
        self.model = FunctionModel(self._answer, model_name="scripted")

    def _answer(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.seen.append(list(messages))
        self.tools.append({each.name for each in (*info.function_tools, *info.output_tools)})
        step = self.steps.pop(0)
        return step if isinstance(step, ModelResponse) else step(messages)

    @property
    def last(self) -> list[ModelMessage]:
        return self.seen[-1]

    def instructions(self, index: int) -> str:
        request = self.seen[index][-1]
        assert isinstance(request, ModelRequest)
        return request.instructions or ""


def finder(*steps: Step, **members: Any) -> tuple[type[Module], Scripted]:
    """A kind of branch with a model of its own."""
    model = Scripted(*(steps or (finish(),)))
    kind = type(
        "Finder",
        (Module,),
        {
            "__doc__": "Finds things.",
            "model": model.model,
            "initial_input": Topic,
            "final_output": Answer,
            **members,
        },
    )
    return kind, model


def parent(*steps: Step, branches: Any = (), **members: Any) -> tuple[Any, Scripted]:
    model = Scripted(*steps)
    kind = type(
        "Parent",
        (Module,),
        {"__doc__": "Leads.", "model": model.model, "branches": list(branches), **members},
    )
    return kind, model


@pytest.mark.contract("M1")
def test_branches_are_a_list_of_modules_named_by_class() -> None:
    kind, _ = finder()
    assert kind.__name__ == "Finder"
    assert kind.description() == "Finds things."
    for wrong in ({"finder": kind}, [Answer], ["Finder"]):
        broken = type("Broken", (Module,), {"branches": wrong})
        with pytest.raises(TypeError, match="list of Module classes"):
            broken()
    same = type("Same", (Module,), {"branches": [kind, type("Finder", (Module,), {})]})
    with pytest.raises(TypeError, match="Finder is used twice"):
        same()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("anthropic/claude-sonnet-4-5", "anthropic:claude-sonnet-4-5"),
        ("openrouter/anthropic/claude-haiku-4.5", "openrouter:anthropic/claude-haiku-4.5"),
        ("openrouter:anthropic/claude-haiku-4.5", "openrouter:anthropic/claude-haiku-4.5"),
        ("test", "test"),
    ],
)
def test_a_model_may_be_named_by_its_provider_and_a_slash(given: str, used: str) -> None:
    assert type("Named", (Module,), {"model": given})().chosen_model == used
    assert Module(model=given).chosen_model == used


@pytest.mark.contract("M2", "M7")
def test_a_run_validates_its_input_and_its_final_output() -> None:
    """Input that does not fit is refused before the run, output at its end."""
    kind, model = finder(call("__finish__", score="high"), finish("done", 0.5))
    result = kind()(subject="x")
    assert result == Answer(text="done", score=0.5)
    assert json.loads(prompts(model.seen[0])[0]) == {"subject": "x", "depth": 1}
    assert len(model.seen) == 2, "the first end was no Answer"
    with pytest.raises(ValidationError):
        kind()(depth=1)


@pytest.mark.contract("M3")
def test_a_module_with_branches_has_a_tool_that_lists_them() -> None:
    kind, _ = finder()
    lead, model = parent(call("branch"), say("ok"), branches=[kind])
    assert lead()() == "ok"
    assert "branch" in model.tools[0]
    (listing,) = ElementTree.fromstring(returned(model.last)[0])
    assert listing.get("name") == "Finder"
    assert listing.findtext("description") == "Finds things."
    first, second = listing.iter("input")
    assert (first.get("name"), first.get("required"), first.text) == (
        "subject",
        "true",
        "what to look at",
    )
    assert (second.get("name"), second.get("required")) == ("depth", "false")
    alone, model = parent(say("ok"))
    alone()()
    assert "branch" not in model.tools[0]


@pytest.mark.contract("M4", "M8")
def test_a_branch_returns_its_result_as_xml() -> None:
    kind, model = finder(finish("a < b"))
    lead, above = parent(
        call("branch", name="Finder", merge="end_result", subject="x"), say("ok"), branches=[kind]
    )
    lead()()
    told = ElementTree.fromstring(returned(above.last)[0])
    assert told.tag == "branch_result"
    assert (told.findtext("text"), told.findtext("score")) == ("a < b", "1.0")
    assert json.loads(prompts(model.last)[-1])["subject"] == "x"


@pytest.mark.contract("M4")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "Nobody"}, "there is no branch 'Nobody'; there are Finder"),
        ({"name": "Finder", "merge": "magic", "subject": "x"}, "merge must be one of"),
        ({"name": "Finder"}, "subject"),
    ],
    ids=["name", "merge", "input"],
)
def test_a_branch_that_cannot_start_is_answered_with_an_error_text(
    arguments: Any, message: str
) -> None:
    kind, model = finder()
    lead, above = parent(call("branch", **arguments), say("ok"), branches=[kind])
    assert lead()() == "ok"
    (told,) = returned(above.last)
    assert told.startswith("Error: ")
    assert message in told
    assert not model.seen


@pytest.mark.contract("M5")
def test_a_branch_has_its_own_prompt_and_a_copy_of_the_conversation() -> None:
    """The copy ends before the call that started the branch; the parent's conversation is
    unchanged."""
    kind, model = finder()
    lead, above = parent(
        call("note"),
        call("branch", name="Finder", subject="x"),
        say("ok"),
        branches=[kind],
        note=tool(lambda self: "noted"),
    )
    lead()()
    first = model.seen[0]
    assert model.instructions(0) == "Finds things."
    assert len(prompts(first)) == 2
    assert returned(first) == ["noted"]
    assert model.tools[0] == {"call_parent_tool", "__finish__", "note"}
    assert len(prompts(above.last)) == 1, "nothing of the branch's turns is in the parent's"


class Tooled(Module):
    """Has tools."""

    @tool
    def add(self, a: int, b: int) -> int:
        """Adds."""
        return a + b

    @tool
    async def fail(self) -> str:
        """Fails."""
        raise RuntimeError("it is broken")


@pytest.mark.contract("M6")
def test_a_branch_calls_its_parents_tools() -> None:
    kind, model = finder(
        call("call_parent_tool"),
        call("call_parent_tool", name="add", a=2, b=3),
        call("call_parent_tool", name="add", a="two", b=3),
        call("call_parent_tool", name="fail"),
        call("call_parent_tool", name="nothing"),
        finish(),
    )
    above = Scripted(call("branch", name="Finder", subject="x"), say("ok"))
    lead = type("Lead", (Tooled,), {"model": above.model, "branches": [kind]})
    lead()()
    listed, added, wrong, failed, unknown = returned(model.last)
    assert {entry["name"] for entry in json.loads(listed)} == {"add", "fail"}
    assert set(json.loads(listed)[0]) == {"name", "description", "parameters"}
    assert added == "5"
    assert wrong.startswith("Error: ")
    assert failed == "Error: it is broken"
    assert "no tool 'nothing'" in unknown


def test_a_branchs_model_is_offered_the_tools_of_its_parents() -> None:
    kind, model = finder(call("add", a=2, b=3), finish())
    above = Scripted(call("branch", name="Finder", subject="x"), say("ok"))
    lead = type("Lead", (Tooled,), {"model": above.model, "branches": [kind]})
    lead()()
    assert {"add", "fail", "call_parent_tool", "__finish__"} <= model.tools[0]
    assert "branch" not in model.tools[0]
    assert returned(model.last) == ["5"]


@pytest.mark.contract("M9", "M10")
@pytest.mark.parametrize("has_output", [True, False], ids=["asked for", "without final_output"])
def test_the_branchs_model_writes_the_summary(has_output: bool) -> None:
    if has_output:
        kind, model = finder(finish("result"), say("I looked."))
        merge, final = "summarize", Answer(text="result").model_dump_json()
    else:
        kind, model = finder(say("an end"), say("I looked."), final_output=None)
        merge, final = "end_result", "null"
    lead, above = parent(
        call("branch", name="Finder", merge=merge, subject="x"), say("ok"), branches=[kind]
    )
    lead()()
    assert returned(above.last) == [f"Branch summary:\nI looked.\n\nFinal result:\n{final}"]
    assert len(model.seen) == 2


@pytest.mark.contract("M11", "M12")
@pytest.mark.parametrize("is_async", [True, False], ids=["awaited", "plain"])
def test_code_can_run_branches_that_are_not_listed(is_async: bool) -> None:
    kind, _ = finder(finish("by code"))
    results: list[Any] = []

    async def awaited(self: Module) -> str:
        """Looks."""
        results.append(await self.branch(kind, subject="x"))  # type: ignore[misc]
        return "looked"

    def plain(self: Module) -> str:
        """Looks."""
        results.append(self.branch(kind, subject="x"))
        return "looked"

    look = awaited if is_async else plain
    lead, above = parent(call(look.__name__), say("ok"), **{look.__name__: tool(look)})
    lead()()
    assert results == [Answer(text="by code")]
    told = [text for text in prompts(above.last) if text.startswith("[Branch Result]")]
    assert len(told) == 1
    assert "<text>by code</text>" in told[0]


@pytest.mark.contract("M11")
def test_a_callback_can_branch_and_a_branch_without_output_returns_none() -> None:
    kind, _ = finder(say("an end"), say("summary"), final_output=None, initial_input=None)
    results: list[Any] = []

    async def on_step(self: Module, step: Any) -> None:
        if not results:
            results.append(await self.branch(kind))  # type: ignore[misc]

    lead, above = parent(call("note"), say("ok"), note=tool(lambda self: "x"), on_step=on_step)
    lead()()
    assert results == [None]
    assert any("[Branch Result]" in text for text in prompts(above.last))


def test_a_step_has_the_results_of_its_tools() -> None:
    """Also of a tool that failed."""
    steps: list[tuple[list[str], list[tuple[str, str]]]] = []

    def fails(self: Module) -> str:
        """Fails."""
        raise ModelRetry("not so")

    def on_step(self: Module, step: Any) -> None:
        results = [(part.tool_name, str(part.content)) for part in step.tool_results]
        steps.append(([part.tool_name for part in step.tool_calls], results))

    both = ModelResponse(parts=[*call("note").parts, *call("fails").parts])
    lead, _ = parent(
        call("note"),
        both,
        say("ok"),
        note=tool(lambda self: "noted"),
        fails=tool(fails),
        on_step=on_step,
    )
    assert lead()() == "ok"
    assert steps == [
        (["note"], [("note", "noted")]),
        (["note", "fails"], [("note", "noted"), ("fails", "not so")]),
        ([], []),
    ]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
def test_appended_messages_reach_the_model_once(is_async: bool) -> None:
    def append(self: Module) -> None:
        if len(self.history) == 3:
            self.history.append("be brief")
            self.history.append({"role": "user", "content": "be kind"})

    async def awaited(self: Module, step: Any) -> None:
        append(self)

    def plain(self: Module, step: Any) -> None:
        append(self)

    lead, above = parent(
        call("note"),
        call("note"),
        say("ok"),
        note=tool(lambda self: "x"),
        on_step=awaited if is_async else plain,
    )
    module = lead()
    module()
    said = [[text for text in prompts(seen) if text.startswith("be ")] for seen in above.seen]
    assert said == [[], ["be brief", "be kind"], ["be brief", "be kind"]]
    assert [text for text in prompts(module.history) if text.startswith("be ")] == said[-1]


@pytest.mark.contract("M13")
def test_a_branch_without_input_works_from_the_conversation() -> None:
    kind, model = finder(initial_input=None)
    lead, above = parent(call("branch", name="Finder"), say("ok"), branches=[kind])
    lead()()
    assert "Finds things." in prompts(model.last)[-1]
    assert "<text>found</text>" in returned(above.last)[0]


@pytest.mark.contract("M14")
@pytest.mark.parametrize("scope", ["all", "immediate"])
def test_tools_accumulate_through_all_levels(scope: str) -> None:
    inner, deepest = finder(call("call_parent_tool"), finish())
    middle_model = Scripted(call("branch", name="Finder", subject="deep"), finish("middle"))

    class Middle(Module):
        """In between."""

        final_output = Answer
        branches: ClassVar[list[type[Module]]] = [inner]

        @tool
        def ask(self) -> str:
            """Asks."""
            return "asked"

    Middle.model = middle_model.model
    Middle.scope = scope  # type: ignore[assignment]
    above = Scripted(call("branch", name="Middle"), say("ok"))
    lead = type("Lead", (Tooled,), {"model": above.model, "branches": [Middle]})
    lead()()
    names = {entry["name"] for entry in json.loads(returned(deepest.last)[-1])}
    assert names == ({"add", "fail", "ask"} if scope == "all" else {"ask"})
    assert len(prompts(deepest.last)) == 3, "the conversation of all levels"
    assert "<text>middle</text>" in returned(above.last)[0]


@pytest.mark.contract("M15")
def test_a_failed_branch_is_an_error_text_for_the_model_and_an_exception_for_code() -> None:
    def broken(messages: list[ModelMessage]) -> ModelResponse:
        raise RuntimeError("the model is away")

    kind, _ = finder(broken, broken)
    raised: list[BaseException] = []

    async def look(self: Module) -> str:
        """Looks."""
        try:
            await self.branch(kind, subject="x")  # type: ignore[misc]
        except BranchError as error:
            raised.append(error)
        return "looked"

    lead, above = parent(
        call("branch", name="Finder", subject="x"),
        call("look"),
        say("ok"),
        branches=[kind],
        look=tool(look),
    )
    assert lead()() == "ok"
    assert "the model is away" in returned(above.last)[0]
    assert returned(above.last)[0].startswith("Error: ")
    assert "the model is away" in str(raised[0])
    assert not any("[Branch Result]" in text for text in prompts(above.last))


@pytest.mark.contract("M15")
def test_a_branch_that_runs_out_of_steps_has_failed() -> None:
    kind, _ = finder(*[call("call_parent_tool")] * 9, max_steps=3)
    lead, above = parent(call("branch", name="Finder", subject="x"), say("ok"), branches=[kind])
    lead()()
    assert "budget of 3 requests" in returned(above.last)[0]


@pytest.mark.contract("M16")
def test_a_branch_uses_its_own_model_or_its_parents() -> None:
    own, model = finder()
    lead, above = parent(
        call("branch", name="Finder", subject="x"),
        call("branch", name="Follower"),
        finish("on the parent's"),
        say("ok"),
        branches=[
            own,
            type("Follower", (Module,), {"__doc__": "Follows.", "final_output": Answer}),
        ],
    )
    assert lead()() == "ok"
    assert len(model.seen) == 1
    assert above.instructions(2) == "Follows."
    assert "<text>on the parent&apos;s</text>" in returned(above.last)[1].replace("'", "&apos;")


@pytest.mark.contract("M17")
def test_branches_of_one_step_run_concurrently_and_share_nothing() -> None:
    """Each branch waits for the other: run one after the other they would never end."""
    met: list[str] = []
    both = asyncio.Event()

    async def meet(name: str) -> str:
        """Meets the other."""
        met.append(name)
        if len(met) == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 60)
        return "met"

    kinds = []
    for name in ("One", "Two"):
        kind, _ = finder(call("meet", name=name), finish(name), tools=[meet])
        kind.__name__ = name
        kinds.append(kind)
    one = call("branch", name="One", subject="x")
    two = call("branch", name="Two", subject="x")
    lead, above = parent(ModelResponse(parts=[*one.parts, *two.parts]), say("ok"), branches=kinds)
    assert lead()() == "ok"
    assert ["One" in returned(above.last)[0], "Two" in returned(above.last)[1]] == [True, True]


@pytest.mark.parametrize("workspace", ["branch", "shared"])
def test_a_branch_may_have_files_of_its_own(real_workspace: Workspace, workspace: str) -> None:
    """The changes of a failed branch are dropped; without files of its own they stay."""
    seen: list[Any] = []

    async def write(self: Module, name: str) -> str:
        """Writes a file."""
        assert self.path is not None
        (self.path / name).write_text("made\n")
        seen.append(self.path)
        return "written"

    def broken(messages: list[ModelMessage]) -> ModelResponse:
        raise RuntimeError("broken")

    good, _ = finder(call("write", name="good"), finish(), write=tool(write), workspace=workspace)
    bad, _ = finder(call("write", name="bad"), broken, write=tool(write), workspace=workspace)
    bad.__name__ = "Bad"
    lead, _ = parent(
        call("branch", name="Finder", subject="x"),
        call("branch", name="Bad", subject="x"),
        say("ok"),
        branches=[good, bad],
    )
    lead(place=real_workspace)()
    assert (real_workspace.path / "good").exists()
    assert (real_workspace.path / "bad").exists() is (workspace == "shared")
    assert (real_workspace.path in seen) is (workspace == "shared")


def test_a_tool_cannot_take_a_reserved_name() -> None:
    taken = type("Taken", (Module,), {"branch_": 1, "tools": [_named("__finish__")]})
    with pytest.raises(TypeError, match="cannot be named __finish__"):
        taken()


def _named(name: str) -> Callable[[], str]:
    def function() -> str:
        return ""

    function.__name__ = name
    return function
