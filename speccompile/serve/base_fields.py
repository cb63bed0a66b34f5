"""What the fields of all requests have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError


class Fields(BaseModel):
    """Fields of one object. Others are refused, no value is converted, and null is as if the field were left out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def wrong(param: str, reason: str) -> PydanticCustomError:
    """The value of ``param`` is not valid beside another field's."""
    return PydanticCustomError("fields_disagree", "{reason}", {"param": param, "reason": reason})
