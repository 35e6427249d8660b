"""A tool of this server: strict arguments, compact answers, errors that say what to do next."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getdoc
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool
from mcp_types import CallToolResult, ToolAnnotations
from pydantic import ConfigDict, ValidationError

from branching.mcp.disconnect import cancelled_when_gone
from branching.mcp.errors import UNKNOWN_OUTCOME, argument_words, error_words
from branching.mcp.models import Answer, printable


class StrictTool(Tool):
    """Refuses unknown arguments, and answers with plain text beside the structure."""

    @classmethod
    def of(
        cls, function: Callable[..., Any], title: str, annotations: ToolAnnotations
    ) -> StrictTool:
        """Returns the tool that calls an async function, which returns an `Answer`.

        The function's docstring is what a model reads.
        """
        tool = cls.from_function(
            function,
            title=title,
            description=getdoc(function),
            annotations=annotations,
            structured_output=True,
        )
        loose = tool.fn_metadata.arg_model
        config = {"model_config": ConfigDict(extra="forbid"), "__module__": loose.__module__}
        strict: Any = type(loose.__name__, (loose,), config)
        tool.fn_metadata.arg_model = strict
        tool.parameters = strict.model_json_schema(by_alias=True)
        assert isinstance(tool, cls), "from_function makes an object of its own class"
        return tool

    async def run(
        self, arguments: dict[str, Any], context: Any, convert_result: bool = False
    ) -> Any:
        """Calls the function.

        Raises:
            ToolError: The arguments are refused, or the call failed; its text is for the model.
            UnexpectedToolError: A fault of this program. The call may have taken effect.
        """
        try:
            async with cancelled_when_gone(context):
                result = await super().run(arguments, context)
            if not convert_result:
                return result
            if isinstance(result, Answer):
                return CallToolResult(
                    content=result.blocks(),
                    structured_content=result.model_dump(mode="json"),
                )
            return self.fn_metadata.convert_result(result)
        except UnexpectedToolError as error:
            message = error_words(error.__cause__) if error.__cause__ else None
            if message is None:
                raise UnexpectedToolError(f"{self.name}: {UNKNOWN_OUTCOME}") from error.__cause__
            raise ToolError(printable(message)) from error.__cause__
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, ValidationError):
                text = argument_words(self.name, cause, self.parameters["properties"])
            else:
                text = str(cause or error)
            raise ToolError(printable(text)) from cause
