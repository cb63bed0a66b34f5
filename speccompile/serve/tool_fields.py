"""Fields of tools, and of the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from speccompile.serve.base_fields import Fields

FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class ToolFields(Fields):
    """Fields of a tool's definition. Additional fields of clients, such as ``cache_control``, have no effect."""

    ignores = ("a field of a tool that the API of chats does not have", "the model is not shown it")


class Function(ToolFields):
    """The function of a tool."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ToolFields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class _Named(Fields):
    name: str


class NamedToolChoice(Fields):
    """Choice of the tool that must be called."""

    type: Literal["function"]
    function: _Named


class _NamedTool(Fields):
    type: Literal["function"]
    function: _Named


class _AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: list[_NamedTool] = Field(min_length=1)


class AllowedToolChoice(Fields):
    """Choice of some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


_CHOICES: dict[Any, type[Fields]] = {"function": NamedToolChoice, "allowed_tools": AllowedToolChoice}


def _choice(value: Any) -> Any:
    if isinstance(value, Fields) or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind].model_validate(value)
    raise ValueError(
        'it must be "none", "auto", "required", {"type": "function", "function": {"name": ...}}, '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
    )


AnyToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, BeforeValidator(_choice)
]
