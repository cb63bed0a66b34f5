"""The fields of tools, and of the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Fields):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields):
    type: Literal["function"]
    function: Function


class _Named(_Fields):
    name: str


class NamedToolChoice(_Fields):
    type: Literal["function"]
    function: _Named


def _choice(value: Any) -> Any:
    if isinstance(value, NamedToolChoice):
        return value
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        return NamedToolChoice.model_validate(value)
    raise ValueError('it has to be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}')


AnyToolChoice = Annotated[Literal["none", "auto", "required"] | NamedToolChoice, BeforeValidator(_choice)]
