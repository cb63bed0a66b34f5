"""Reads the JSON body of a request within limits, and checks it against a model of its fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from speccompile.errors import shown
from speccompile.serve.api_error import ApiError
from speccompile.serve.options import ServeOptions
from speccompile.serve.refused import check_refused

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body], options: ServeOptions) -> Body:
    """The body of ``request`` as ``kind``.

    Raises:
        ApiError: it is too large, no JSON, too deep, or a field is unknown or wrong.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("the body has to be JSON: send the header Content-Type: application/json", status=415)
    return checked(parse(await read_bytes(request, options.max_body_bytes), options.max_depth), kind)


async def read_bytes(request: Request, most: int) -> bytes:
    """The body, of at most ``most`` bytes. The rest of a larger one is not read.

    Raises:
        ApiError: it is larger.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ApiError(f"the body is larger than {most} bytes", status=413, code="body_too_large")
        parts.append(part)
    return b"".join(parts)


def parse(data: bytes, max_depth: int) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ApiError: ``data`` is something else, or nests deeper than ``max_depth``.
    """
    too_deep = ApiError(f"the body nests deeper than {max_depth} levels")
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise too_deep from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body has to be a JSON object")
    level: list[Any] = [body]
    for _ in range(max_depth):
        values = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for part in values for item in part if isinstance(item, dict | list)]
    if level:
        raise too_deep
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def checked(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """``body`` as ``kind``.

    Raises:
        ApiError: names the first field that is unknown or wrong.
    """
    given = check_refused(body, kind)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _of_validation(error, kind) from None


def _of_validation(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    found = error.errors(include_url=False)
    unknown = [item for item in found if item["type"] == "extra_forbidden"]
    first = (unknown or found)[0]
    place, context = first["loc"], first.get("ctx", {})
    param = _path((*place, context["param"]) if "param" in context else place)
    if unknown:
        known = f"; these are known: {', '.join(sorted(kind.model_fields))}" if len(place) == 1 else ""
        return ApiError(f"{param}: unknown field{known}", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(f"{param}: the field is missing", param=param, code="missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    got = "" if "param" in context else f"; got {shown(first['input'])}"
    return ApiError(f"{param}: {reason}{got}", param=param, code="invalid_value")


def _path(parts: tuple[int | str, ...]) -> str:
    """``messages[0].role``. Names of a union's members, which pydantic adds, are left out."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path


#: Names that pydantic gives to members of unions.
_UNION_MEMBERS = frozenset({"str", "dict", "NamedToolChoice"})
