"""Reads the JSON body of a request within limits, and checks it against a model of its fields."""

from __future__ import annotations

import difflib
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
        ApiError: ``data`` is something else, nests deeper than ``max_depth``, or has a string that is no Unicode text.
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
    # Only escapes can write a lone surrogate: the bytes are UTF-8.
    if b"\\u" in data:
        _check_text(body, "")
    return body


def _check_text(value: Any, path: str) -> None:
    """Raises ApiError if a string in ``value``, which is at ``path``, has a lone surrogate."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            message = f"{path}: character {error.start} is half of a surrogate pair, which is not a character"
            raise ApiError(message, param=path, code="invalid_value") from None
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            place = _joined(path, name)
            _check_text(name, place)
            _check_text(item, place)


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
        raise _of_validation(error, kind, given) from None


def _of_validation(error: ValidationError, kind: type[BaseModel], body: Mapping[str, Any]) -> ApiError:
    found = error.errors(include_url=False)
    unknown = [item for item in found if item["type"] == "extra_forbidden"]
    first = (unknown or found)[0]
    place, context = first["loc"], first.get("ctx", {})
    param = _path(place, body)
    if "param" in context:
        param = _joined(param, context["param"])
    if unknown:
        return ApiError(f"{param}: unknown field{_known(place, kind)}", param=param, code="unknown_field")
    if first["type"] == "missing":
        param = _joined(param, str(place[-1]))
        return ApiError(f"{param}: the field is missing", param=param, code="missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    got = "" if "param" in context else f"; got {shown(first['input'])}"
    return ApiError(f"{param}: {reason}{got}", param=param, code="invalid_value")


def _known(place: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """The field that may have been meant by an unknown one of the body, else all fields."""
    if len(place) > 1:
        return ""
    close = difflib.get_close_matches(str(place[0]), kind.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else f"; these are known: {', '.join(sorted(kind.model_fields))}"


def _path(place: tuple[int | str, ...], value: Any) -> str:
    """``messages[0].role``, for the place of an error in ``value``. A place may also have names that pydantic gives to
    the members of a union; no part of ``value`` has them."""
    path = ""
    for part in place:
        if isinstance(value, dict) and str(part) in value:
            path = f"{path}[{part}]" if isinstance(part, int) else _joined(path, part)
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
    return path


def _joined(path: str, name: str) -> str:
    """The field ``name`` of what is at ``path``. A name that is not an identifier is written as JSON."""
    shown_name = name if name.isidentifier() else json.dumps(name)
    if not path:
        return shown_name
    return f"{path}.{name}" if name.isidentifier() else f"{path}[{shown_name}]"
