"""What the fields of all requests have in common."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError

from speccompile.serve.ignored import log_ignored


def _stop_lists_at_the_first_error(schema: Any) -> None:
    """In all parts of a pydantic schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_lists_at_the_first_error(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_the_first_error(part)


class Fields(BaseModel):
    """Fields of one object. Others are refused, no value is converted, and null is as if the field were left out.

    The number of errors of a body does not grow with it: a list stops at its first wrong item, and of unknown names the
    first one is reported.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    #: For objects that ignore other fields: what these are, and why they have no effect. The first of them is logged.
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
    """The field of ``kind`` that may have been meant by ``name``."""
    # The time of a comparison grows with the square of the length.
    close = difflib.get_close_matches(name[:64], kind.model_fields, n=1)
    return close[0] if close else None


def wrong(param: str, reason: str) -> PydanticCustomError:
    """The value of ``param`` is not valid beside another field's."""
    return PydanticCustomError("fields_disagree", "{reason}", {"param": param, "reason": reason})


def _whole(value: Any) -> Any:
    """JSON has one type of numbers: 6.0 is the number 6."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(whole, int) and not -(2**63) <= whole < 2**63:
        raise ValueError("it has to be a number of 64 bits")
    return whole


def whole_items(value: Any) -> Any:
    """Apply :func:`_whole` to each item of a list, which may have millions; integers of any size pass."""
    if not isinstance(value, list):
        return value
    return [int(item) if type(item) is float and item.is_integer() else item for item in value]


def _token_limit(value: Any) -> Any:
    """-1 is no limit, as in llama.cpp."""
    return None if value == -1 else _whole(value)


#: A whole number, which may be written with a fraction of zero.
Whole = Annotated[int, BeforeValidator(_whole)]
#: Token ids, which may be written with a fraction of zero.
TokenIds = Annotated[list[int], BeforeValidator(whole_items)]
#: Most new tokens. None, or -1 in JSON, is as many as fit.
TokenLimit = Annotated[int | None, BeforeValidator(_token_limit)]
