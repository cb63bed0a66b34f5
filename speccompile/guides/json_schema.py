"""Guides from JSON schemas, through a regular expression.

Unknown keywords are refused, not ignored: every text that follows the guide is valid for the schema. The reverse is not
true. Properties must come in the order of the schema, and a ``pattern`` must match the whole string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, shown
from speccompile.errors.base import clipped
from speccompile.guides.guide import Guide
from speccompile.guides.json_regex import (
    CHARACTER,
    COMMA,
    FORMATS,
    SPACE,
    any_of,
    constant,
    ecma_pattern,
    matches_escaped,
    members,
    separated,
    times,
)
from speccompile.guides.regex import byte_index, guide_of, without_anchors
from speccompile.utils.json_faults import json_fault

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "$comment", "$defs", "definitions"}
)
_PARTS = ("Integer", "Fraction", "Exponent")
KEYWORDS: Mapping[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset({"minDigits", "maxDigits"}),
    "number": frozenset(f"{end}Digits{part}" for end in ("min", "max") for part in _PARTS),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}


def json_schema_guide(schema: Mapping[str, Any] | str | type, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Build a guide for JSON that is valid for ``schema``, with at most one space where JSON allows white space.

    Args:
        schema: a dict, JSON text, or a class with ``model_json_schema`` (pydantic's). To limit their length, integers
            may have ``minDigits`` and ``maxDigits``, and numbers ``minDigitsInteger``, ``maxDigitsFraction`` and so on
            (as in outlines).
        tokenizer: the model's tokenizer, a fast one.

    Raises:
        InvalidGuide: the schema is not valid, uses a keyword that a finite automaton cannot check, or matches nothing.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    pattern, text = _read(schema)
    return guide_of(pattern, text, tokenizer)


def json_schema_regex(schema: Mapping[str, Any] | str | type) -> str:
    """Regular expression of ``schema``, for use in a larger one. :func:`json_schema_guide` builds a guide from it.

    Raises:
        InvalidGuide: the cases of :func:`json_schema_guide`.
    """
    return _read(schema)[0]


def _read(schema: Mapping[str, Any] | str | type) -> tuple[str, str]:
    """The expression of ``schema``, and its JSON text."""
    given = _as_dict(schema)
    try:
        text = json.dumps(given)
    except (TypeError, ValueError) as error:
        reason = json_fault(error) if isinstance(error, ValueError) else str(error)
        raise InvalidGuide(what="the schema", reason=f"it is not JSON: {reason}") from error
    # A round trip through JSON converts names to str.
    root: dict[str, Any] = json.loads(text)
    return _Reader(root, text).regex(root, "the schema", ()), text


def _as_dict(schema: Any) -> dict[str, Any]:
    method = getattr(schema, "model_json_schema", None)
    value = method() if callable(method) else schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidGuide(what=repr(schema), reason=f"it is not JSON: {json_fault(error)}") from error
    if not isinstance(value, Mapping):
        raise InvalidGuide(what=repr(schema), reason="a JSON schema must be an object")
    return dict(value)


class _Reader:
    """Translates a schema into a regular expression, or raises InvalidGuide."""

    def __init__(self, root: Mapping[str, Any], text: str) -> None:
        self._root, self._text = root, text

    def _refuse(self, where: str, reason: str) -> NoReturn:
        raise InvalidGuide(what=self._text, reason=f"{clipped(where)}{reason}")

    def regex(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        """Expression of ``schema``.

        Args:
            where: position of ``schema`` within the whole, for errors.
            inside: the references that enclose ``schema``.
        """
        if not isinstance(schema, Mapping) or not (given := schema.keys() - ANNOTATIONS):
            self._refuse(where, " allows anything; give its type")
        if given == {"$ref"}:
            return self._reference(schema["$ref"], where, inside)
        if given == {"anyOf"} or given == {"allOf"}:
            (name,) = given
            parts = self._list(schema[name], f"{where}: {name}")
            if name == "allOf" and len(parts) > 1:
                self._refuse(where, ": allOf of more than one schema cannot be followed")
            return any_of([self.regex(part, f"{where}, {name}[{i}]", inside) for i, part in enumerate(parts)])
        if given <= {"const", "type"} and "const" in given:
            return self._constants([schema["const"]], schema, where)
        if given <= {"enum", "type"} and "enum" in given:
            return self._constants(self._list(schema["enum"], f"{where}: enum"), schema, where)
        kind = schema.get("type")
        if isinstance(kind, list) and given == {"type"}:
            parts = self._list(kind, f"{where}: type")
            return any_of([self.regex({"type": name}, where, inside) for name in parts])
        if not isinstance(kind, str) or kind not in KEYWORDS:
            names = ", ".join(sorted(given - {"type"})) or f"type {shown(kind)}"
            advice = "; write anyOf, if no text fits two of them" if "oneOf" in given else ""
            self._refuse(where, f": {clipped(names)} cannot be followed{advice}")
        if unknown := given - KEYWORDS[kind] - {"type"}:
            known = ", ".join(sorted(KEYWORDS[kind])) or "nothing"
            names = ", ".join(sorted(unknown))
            self._refuse(where, f": {clipped(names)} cannot be followed; beside type {kind!r} it knows {known}")
        makers: dict[str, Callable[[Mapping[str, Any], str, tuple[str, ...]], str]] = {
            "null": lambda *_: "null",
            "boolean": lambda *_: "(?:true|false)",
            "integer": self._integer,
            "number": self._number,
            "string": self._string,
            "array": self._array,
            "object": self._object,
        }
        return makers[kind](schema, where, inside)

    def _list(self, value: Any, where: str) -> Sequence[Any]:
        if not isinstance(value, list | tuple) or not value:
            self._refuse(where, " must be a list that is not empty")
        return value

    def _reference(self, name: Any, where: str, inside: tuple[str, ...]) -> str:
        place = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", name) if isinstance(name, str) else None
        target = None
        if place and isinstance(defined := self._root.get(place[1]), Mapping):
            target = defined.get(place[2].replace("~1", "/").replace("~0", "~"))
        if target is None:
            self._refuse(where, f": $ref {shown(name)} leads nowhere; it must be #/$defs/NAME or #/definitions/NAME")
        if name in inside:
            self._refuse(where, f": {clipped(name)} contains itself, and a finite automaton cannot follow that")
        return self.regex(target, f"{where}, {name}", (*inside, name))

    def _constants(self, values: Sequence[Any], schema: Mapping[str, Any], where: str) -> str:
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for value in values:
            if kinds and not any(isinstance(kind, str) and _is_of(value, kind) for kind in kinds):
                self._refuse(where, f": {shown(value)} is not of type {shown(schema['type'])}")
        try:
            return any_of([constant(value) for value in values])
        except (TypeError, ValueError) as error:
            self._refuse(where, f": a value is not JSON ({error})")

    def _bounds(self, schema: Mapping[str, Any], names: tuple[str, str], where: str, least: int) -> tuple[int, Any]:
        """Lower and upper bound of ``schema``, under ``names``. The upper one may be missing: None."""
        for name in names:
            value = schema.get(name)
            if name in schema and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                self._refuse(where, f": {name} must be an int of at least {least}")
        low, high = schema.get(names[0], least), schema.get(names[1])
        if high is not None and high < low:
            self._refuse(where, f": {names[1]} is smaller than {names[0]}")
        return low, high

    def _digits(self, schema: Mapping[str, Any], part: str, where: str, before: int = 0) -> str:
        """Suffix that repeats a digit, for the digits after the first ``before`` ones."""
        low, high = self._bounds(schema, (f"minDigits{part}", f"maxDigits{part}"), where, 1)
        return times(low - before, None if high is None else high - before)

    def _integer(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...], part: str = "") -> str:
        more = self._digits(schema, part, where, 1)
        # Zero has one digit.
        return f"-?[1-9][0-9]{more}" if schema.get(f"minDigits{part}", 1) > 1 else f"-?(?:0|[1-9][0-9]{more})"

    def _number(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        fraction = rf"\.[0-9]{self._digits(schema, 'Fraction', where)}"
        exponent = f"[eE][+-][0-9]{self._digits(schema, 'Exponent', where)}"
        return f"{self._integer(schema, where, inside, 'Integer')}(?:{fraction})?(?:{exponent})?"

    def _string(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        kinds = [name for name in ("pattern", "format") if name in schema]
        if {"minLength", "maxLength"} & schema.keys():
            kinds.append("minLength or maxLength")
        if len(kinds) > 1:
            self._refuse(where, f": {' and '.join(kinds)} cannot be followed together")
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                self._refuse(where, f": format {shown(schema['format'])} is not known; these are: {', '.join(FORMATS)}")
            return f'"(?:{FORMATS[schema["format"]]})"'
        if "pattern" in schema:
            return f'"(?:{self._pattern(schema["pattern"], where)})"'
        return f'"{CHARACTER}{times(*self._bounds(schema, ("minLength", "maxLength"), where, 0))}"'

    def _pattern(self, pattern: Any, where: str) -> str:
        if not isinstance(pattern, str):
            self._refuse(where, ": its pattern must be a str")
        pattern = ecma_pattern(without_anchors(pattern))
        byte_index(pattern, self._text)
        if matches_escaped(pattern, self._text):
            reason = (
                ": its pattern may match a character that JSON must escape (a quote, backslash or control character); "
                "list the allowed characters, such as [a-z ]"
            )
            self._refuse(where, reason)
        return pattern

    def _array(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        if ("items" in schema) == ("prefixItems" in schema):
            self._refuse(where, ": give either items or prefixItems")
        low, high = self._bounds(schema, ("minItems", "maxItems"), where, 0)
        if "prefixItems" in schema:
            if {"minItems", "maxItems"} & schema.keys():
                reason = ": prefixItems has as many items as it names; minItems and maxItems cannot be followed"
                self._refuse(where, reason)
            parts = self._list(schema["prefixItems"], f"{where}: prefixItems")
            items = COMMA.join(self.regex(part, f"{where}, {i}", inside) for i, part in enumerate(parts))
            return rf"\[{SPACE}{items}{SPACE}\]"
        item = self.regex(schema["items"], f"{where}, items", inside)
        return rf"\[{SPACE}{separated(item, low, high)}{SPACE}\]"

    def _object(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        others, required = schema.get("additionalProperties"), schema.get("required", [])
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            self._refuse(where, ": properties must be an object, and required a list")
        if not all(isinstance(name, str) for name in required):
            self._refuse(where, ": required must be a list of names")
        if unknown := sorted(set(required) - properties.keys()):
            self._refuse(where, f": {', '.join(unknown)} is required and not among its properties")
        if "properties" not in schema:
            if not isinstance(others, Mapping):
                self._refuse(where, ": give its properties, or the schema of all of them (additionalProperties)")
            value = self.regex(others, f"{where}, additionalProperties", inside)
            found = separated(f'"{CHARACTER}*"{SPACE}:{SPACE}{value}', 0, None)
        elif others not in (None, False, True):
            self._refuse(where, ": beside properties, schemas of others cannot be followed")
        else:
            pairs = [
                (f"{constant(name)}{SPACE}:{SPACE}{self.regex(value, f'{where}, {name}', inside)}", name in required)
                for name, value in properties.items()
            ]
            found = members(pairs)
        return rf"\{{{SPACE}{found}{SPACE}\}}"


def _is_of(value: Any, kind: str) -> bool:
    """Return whether ``value`` is of the JSON Schema type ``kind``."""
    if kind in ("integer", "number"):
        whole = isinstance(value, int) or (isinstance(value, float) and (kind == "number" or value.is_integer()))
        return whole and not isinstance(value, bool)
    types: dict[str, Any] = {
        "null": type(None),
        "boolean": bool,
        "string": str,
        "array": (list, tuple),
        "object": Mapping,
    }
    return isinstance(value, types.get(kind, ()))
