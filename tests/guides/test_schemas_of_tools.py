"""Schemas as MCP servers and pydantic write them are followed with nothing left out, and drawn texts are valid."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from speccompile.errors import InvalidGuide
from speccompile.guides import json_schema_guide
from support.guide_tokenizers import byte_level, draw_json

MCP = json.loads((pathlib.Path(__file__).parent / "mcp_tools" / "github.json").read_text())
#: The goal.
SHARE = 0.95


class Colour(enum.Enum):
    RED, GREEN = "red", "green"


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    bark: int = 3


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)]


class Node(pydantic.BaseModel):
    value: int
    children: list[Node] = []


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    name: str | None = None
    size: decimal.Decimal


#: Types of fields, as people write them.
FIELDS: list[Any] = [
    *(int, float, str, bool, bytes, Any, None, dict, list, tuple),
    *(list[int], dict[str, int], dict[int, str], tuple[int, str], tuple[int, ...], list[dict[str, bool | None]]),
    *(int | None, str | int, Literal["a", 1, None], Colour, list[Colour]),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID, decimal.Decimal, pathlib.Path),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, pydantic.AnyUrl, pydantic.SecretStr),
    *(pydantic.Json, pydantic.Base64Bytes, pydantic.PositiveInt, pydantic.conlist(int, min_length=1, max_length=3)),
    Annotated[str, pydantic.Field(pattern=r"^[a-z]+-\d{2,4}$")],
    Annotated[float, pydantic.Field(gt=0, lt=1)],
    Annotated[int, pydantic.Field(multiple_of=5)],
    Annotated[Dog | Cat, pydantic.Field(discriminator="kind")],
    Dog | Cat,
    Node,
    Closed,
    dict[Literal["a", "b"], int],
    dict[Colour, list[Closed]],
    # Its items differ.
    set[int],
]


def of_pydantic() -> list[dict[str, Any]]:
    return [pydantic.TypeAdapter(pydantic.create_model("Model", field=(kind, ...))).json_schema() for kind in FIELDS]


@pytest.mark.parametrize("schemas", [list(MCP.values()), of_pydantic()], ids=["mcp", "pydantic"])
def test_schemas_of_tools_are_followed(schemas: list[dict[str, Any]]) -> None:
    refused = []
    for schema in schemas:
        try:
            guide = json_schema_guide(schema, byte_level())
        except InvalidGuide as error:
            refused.append(error.fields["reason"])
            continue
        assert guide.loosened == ()
        text = draw_json(guide, random.Random(0))
        assert text is None or jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), (schema, text)
    assert len(refused) <= (1 - SHARE) * len(schemas), refused
