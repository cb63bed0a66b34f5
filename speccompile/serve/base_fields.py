"""Base class and types of request fields."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from speccompile.serve.ignored import log_ignored


def _stop_lists_at_the_first_error(schema: Any) -> None:
    """Let each list in a pydantic schema stop at its first wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_lists_at_the_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_the_first_error(part)


class Fields(BaseModel):
    """Fields of one object. Unknown fields are refused, values are not converted, and null is a missing field.

    The number of errors is bounded for any body: a list stops at its first wrong item, and only the first unknown name
    is reported.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    #: For objects that ignore unknown fields: a description of these, and the reason why they have no effect, for the
    #: log.
    ignores: ClassVar[tuple[str, str] | None] = None

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_the_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if value is not None}
        if cls.model_config["extra"] == "allow":
            return kept
        names = {item.alias or name for name, item in cls.model_fields.items()}
        unknown = [name for name in kept if name not in names]
        if unknown and cls.ignores is not None:
            log_ignored(*cls.ignores)
        for name in unknown if cls.ignores is not None else unknown[1:]:
            del kept[name]
        return kept


def similar_field(name: str, kind: type[BaseModel]) -> str | None:
    """Find a field of ``kind`` that the client may have meant by ``name``."""
    # The comparison is quadratic in the length.
    close = difflib.get_close_matches(name[:64], kind.model_fields, n=1)
    return close[0] if close else None


def wrong(param: str, reason: str) -> PydanticCustomError:
    """Create the error of a value of ``param`` that is not valid together with another field."""
    return PydanticCustomError("fields_disagree", "{reason}", {"param": param, "reason": reason})


def _whole(value: Any) -> Any:
    """Convert 6.0 to 6: JSON has one type of numbers."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, int) and not -(2**63) <= whole < 2**63:
        raise ValueError("it must be a number of 64 bits")
    return whole


def whole_items(value: Any) -> Any:
    """Apply :func:`_whole` to the items of a list, which may have millions. A list of only integers is returned as it
    is."""
    if not isinstance(value, list):
        return value
    return [int(item) if type(item) is float and item.is_integer() else item for item in value]


def _token_limit(value: Any) -> Any:
    """Convert -1, which means no limit as in llama.cpp, to None."""
    return None if value == -1 else _whole(value)


#: A whole number. 6.0 is accepted, too.
Whole = Annotated[int, BeforeValidator(_whole)]
#: Token ids. 6.0 is accepted, too.
TokenIds = Annotated[list[int], BeforeValidator(whole_items)]
#: Largest number of new tokens. None, or -1 in JSON, is the number that fits.
TokenLimit = Annotated[int | None, BeforeValidator(_token_limit)]
