"""Reads the JSON body of a request within limits, and validates it by a model of its fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from speccompile.errors import shown
from speccompile.errors.base import clipped
from speccompile.serve.api_error import ApiError
from speccompile.serve.base_fields import similar_field
from speccompile.serve.disconnect import while_connected
from speccompile.serve.options import ServeOptions
from speccompile.serve.refused import check_refused
from speccompile.utils.json_faults import json_fault

Body = TypeVar("Body", bound=BaseModel)

#: Largest number of objects, lists and names in a body. Parsing holds the interpreter, and Python's garbage collector
#: visits each of them several times.
MOST_PARTS = 131_072
#: Largest size in bytes of a body that is parsed in the event loop, which needs a few milliseconds.
_SHORT = 32_768
#: Number of bodies of the largest size that may be read and parsed at the same time.
_MOST_LARGE = 16


class BodyReader:
    """Reads and validates bodies. Long ones are parsed one at a time in a separate thread. The event loop continues,
    and at most one of them holds the interpreter.

    Args:
        options: the limits.
    """

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="speccompile-bodies")
        # Total bytes of the bodies that are being read or parsed.
        self._held = 0

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Read the body of ``request`` as a ``kind``.

        Raises:
            ApiError: the body is too large, too slow, not JSON or too deep, or a field is unknown or wrong.
            ClientLeft: the client left while its body waited to be parsed.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("the body must be JSON: send the header Content-Type: application/json", status=415)
        options, size = self._options, 0

        def hold(count: int) -> None:
            nonlocal size
            size += count
            self._held += count
            if size > _SHORT and self._held > _MOST_LARGE * options.max_body_bytes:
                raise ApiError("the server reads too many large bodies; try again later", status=429, code="busy")

        try:
            data = await read_bytes(request, options.max_body_bytes, options.max_body_seconds, hold)
            if len(data) <= _SHORT:
                return checked(parse(data, options.max_depth), kind)
            return await while_connected(request.receive, self._parse_in_thread(data, kind))
        finally:
            self._held -= size

    async def _parse_in_thread(self, data: bytes, kind: type[Body]) -> Body:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: checked(parse(data, self._options.max_depth), kind))

    def close(self) -> None:
        """End the thread after the body that it parses."""
        self._thread.shutdown(wait=False, cancel_futures=True)


async def read_bytes(
    request: Request, most: int, seconds: float, hold: Callable[[int], None] = lambda count: None
) -> bytes:
    """Read the body, of at most ``most`` bytes. The rest of a larger one is not read.

    Args:
        seconds: time within which the body must arrive.
        hold: called with the size of each part.

    Raises:
        ApiError: the body is larger, or has not arrived in time.
    """
    too_large = ApiError(f"the body is larger than {most} bytes", status=413, code="body_too_large")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise too_large
                hold(len(part))
                parts.append(part)
    except TimeoutError:
        raise ApiError(f"the body has not arrived within {seconds} s", status=408, code="body_too_slow") from None
    return b"".join(parts)


def parse(data: bytes, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ApiError: ``data`` is something else, nests deeper than ``max_depth``, has more than :data:`MOST_PARTS`
            objects, lists and names, or has a string that is not valid Unicode.
    """
    too_deep = ApiError(f"the body nests deeper than {max_depth} levels")
    if _parts(data) > MOST_PARTS:
        raise ApiError(
            f"the body has more than {MOST_PARTS} objects, lists and names", status=413, code="body_too_large"
        )
    try:
        body = json.loads(data.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise too_deep from None
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 (byte {error.start})") from None
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {json_fault(error)}") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    level: list[Any] = [body]
    for _ in range(max_depth):
        values = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for part in values for item in part if isinstance(item, dict | list)]
    if level:
        raise too_deep
    # The bytes are valid UTF-8, so a lone surrogate can only come from an escape.
    if re.search(rb"\\u[dD][89a-fA-F]", data) and (found := _lone_surrogate(body)):
        location, character = found
        param = _path(tuple(reversed(location)), body)
        message = f"{param}: character {character} is half of a surrogate pair, which is not a character"
        raise ApiError(message, param=param, code="invalid_value")
    return body


def _parts(data: bytes) -> int:
    """Count objects, lists and names without building them."""
    marks = (b"[", b"{", b":")
    count = sum(data.count(mark) for mark in marks)
    if count <= MOST_PARTS:
        # The count is within the limit even with the characters in strings.
        return count
    outside = data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
    rest = b"".join(outside)
    return sum(rest.count(mark) for mark in marks)


def _lone_surrogate(value: Any) -> tuple[list[int | str], int] | None:
    """Find the first string in ``value`` with a lone surrogate. Returns its path, innermost part first, and the index
    of the character."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return [], error.start
        return None
    if isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            found = (isinstance(name, str) and _lone_surrogate(name)) or _lone_surrogate(item)
            if found:
                found[0].append(name)
                return found
    return None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def checked(body: Mapping[str, Any], kind: type[Body]) -> Body:
    """Validate ``body`` as a ``kind``.

    Raises:
        ApiError: a field is unknown or wrong. The error names the first one.
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
    location, context = first["loc"], first.get("ctx", {})
    param = _path(location, body)
    if "param" in context:
        param = _joined(param, context["param"])
    if unknown:
        return ApiError(f"{param}: unknown field{_known(location, kind)}", param=param, code="unknown_field")
    if first["type"] == "missing":
        param = _joined(param, str(location[-1]))
        return ApiError(f"{param}: the field is missing", param=param, code="missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    got = "" if "param" in context else f"; got {shown(first['input'])}"
    return ApiError(f"{param}: {reason}{got}", param=param, code="invalid_value")


def _known(location: tuple[int | str, ...], kind: type[BaseModel]) -> str:
    """Hint at a similar field for an unknown field of the body, or list all fields."""
    if len(location) > 1:
        return ""
    similar = similar_field(str(location[0]), kind)
    return f"; did you mean {similar}?" if similar else f"; these are known: {', '.join(sorted(kind.model_fields))}"


def _path(location: tuple[int | str, ...], value: Any) -> str:
    """Path of an error in ``value``, such as ``messages[0].role``, clipped for a message. Names that pydantic gives to
    the members of a union are not in ``value`` and are left out."""
    path = ""
    for part in location:
        if isinstance(value, dict) and str(part) in value:
            path = f"{path}[{part}]" if isinstance(part, int) else _joined(path, part)
            value = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
    return clipped(path)


def _joined(path: str, name: str) -> str:
    """Append the field ``name`` to ``path``. A name that is not an identifier is written as JSON. A long one is
    truncated."""
    is_plain = name.isidentifier()
    shown_name = clipped(name) if is_plain else json.dumps(clipped(name))
    if not path:
        return shown_name
    return f"{path}.{shown_name}" if is_plain else f"{path}[{shown_name}]"
