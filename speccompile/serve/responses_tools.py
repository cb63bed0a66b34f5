"""Tools of ``/v1/responses``, and the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, Tag

from speccompile.serve.base_fields import Fields
from speccompile.serve.message_fields import OpenFields
from speccompile.serve.tool_fields import (
    FUNCTION_NAME,
    AllowedToolChoice,
    Function,
    NamedToolChoice,
    Tool,
    ToolFields,
)


class FunctionTool(ToolFields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        """The equivalent tool of a chat."""
        function = Function(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return Tool(type="function", function=function)


def _no_custom(kind: str) -> str:
    """Raise ValueError for a custom tool, which the client would run."""
    if kind == "custom":
        raise ValueError("custom tools are not supported; use a function with one parameter of type string")
    return kind


class OtherTool(OpenFields):
    """A tool that is not a function, such as a web search. It is not shown to the model."""

    type: Annotated[str, AfterValidator(_no_custom)]


def _kind(value: Any) -> str:
    return "function" if isinstance(value, dict) and value.get("type") == "function" else "other"


AnyTool = Annotated[Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")], Discriminator(_kind)]


class NamedFunction(Fields):
    """Choice of the function that must be called."""

    type: Literal["function"]
    name: str

    def as_chat(self) -> NamedToolChoice:
        """The equivalent choice of a chat."""
        return NamedToolChoice.model_validate({"type": "function", "function": {"name": self.name}})


class AllowedFunctions(Fields):
    """Choice of some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction] = Field(min_length=1)

    def as_chat(self) -> AllowedToolChoice:
        """The equivalent choice of a chat."""
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in self.tools]
        allowed = {"mode": self.mode, "tools": tools}
        return AllowedToolChoice.model_validate({"type": "allowed_tools", "allowed_tools": allowed})


_CHOICES: dict[Any, type[NamedFunction | AllowedFunctions]] = {
    "function": NamedFunction,
    "allowed_tools": AllowedFunctions,
}


def _choice(value: Any) -> Any:
    if isinstance(value, BaseModel) or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind].model_validate(value)
    raise ValueError(
        'it must be "none", "auto", "required", {"type": "function", "name": ...}, '
        'or {"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions, BeforeValidator(_choice)]
