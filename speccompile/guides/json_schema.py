"""Guides from JSON schemas, by way of a regular expression.

Keywords that it does not know are refused, not passed over, so that a text which follows the guide is valid by the
schema, always. Not every valid text follows it: properties come in the order of the schema, and a string that
has a ``pattern`` matches it as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide
from speccompile.guides.regex import END, byte_index, guide_of, without_anchors

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
# 29 February is left out.
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[12][0-9]{{3}}-{_DAY}"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR})"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
_PATH = "[A-Za-z0-9._~!$&'()*+,;=:@-]*"
#: RFC 3339, 4122, 3986 and 5321; a part of what those allow.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"https?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_PATH})*(?:\?{_PATH})?(?:#{_PATH})?",
    "email": rf"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@{_HOST}",
}
# Without the marks around a text, which are no characters.
_CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F\x{10FFFE}\x{10FFFF}]|\\["\\/bfnrt])'
_SPACE = " ?"
_COMMA = f"{_SPACE},{_SPACE}"


def json_schema_guide(schema: Mapping[str, Any] | str | type, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Texts that are JSON and valid by ``schema``, with at most one space where JSON allows any.

    Args:
        schema: as a dict, as JSON text, or a class with ``model_json_schema`` (pydantic's). Integers may have
            ``minDigits`` and ``maxDigits``, and numbers ``minDigitsInteger``, ``maxDigitsFraction`` and so on (as in
            outlines), so that their texts come to an end.
        tokenizer: of the model, a fast one.

    Raises:
        InvalidGuide: it is no schema, uses a keyword that a finite automaton cannot check, or nothing matches it.
        InvalidInput: the tokenizer does not tell the bytes of its tokens.
    """
    given = _as_dict(schema)
    try:
        text = json.dumps(given)
    except (TypeError, ValueError) as error:
        raise InvalidGuide(what=repr(given), reason=f"it is no JSON: {error}") from error
    # As JSON has it: names are texts.
    root: dict[str, Any] = json.loads(text)
    return guide_of(_Reader(root, text).regex(root, "the schema", ()), text, tokenizer)


def _as_dict(schema: Any) -> dict[str, Any]:
    made = getattr(schema, "model_json_schema", None)
    value = made() if callable(made) else schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidGuide(what=repr(schema), reason=f"it is no JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise InvalidGuide(what=repr(schema), reason="a JSON schema is an object")
    return dict(value)


class _Reader:
    """Turns a schema into a regular expression, or says why it cannot."""

    def __init__(self, root: Mapping[str, Any], text: str) -> None:
        self._root, self._text = root, text

    def _refuse(self, where: str, reason: str) -> NoReturn:
        raise InvalidGuide(what=self._text, reason=f"{where}{reason}")

    def regex(self, schema: Any, where: str, inside: tuple[str, ...]) -> str:
        """Args:
        inside: the references that led here.
        """
        if not isinstance(schema, Mapping) or not (given := schema.keys() - ANNOTATIONS):
            self._refuse(where, " allows anything; say what type it has")
        if given == {"$ref"}:
            return self._reference(schema["$ref"], where, inside)
        if given == {"anyOf"} or given == {"allOf"}:
            (name,) = given
            parts = self._list(schema[name], f"{where}: {name}")
            if name == "allOf" and len(parts) > 1:
                self._refuse(where, ": allOf of more than one schema cannot be followed")
            return _any_of([self.regex(part, f"{where}, {name}[{i}]", inside) for i, part in enumerate(parts)])
        if given <= {"const", "type"} and "const" in given:
            return self._constants([schema["const"]], schema, where)
        if given <= {"enum", "type"} and "enum" in given:
            return self._constants(self._list(schema["enum"], f"{where}: enum"), schema, where)
        kind = schema.get("type")
        if isinstance(kind, list) and given == {"type"}:
            parts = self._list(kind, f"{where}: type")
            return _any_of([self.regex({"type": name}, where, inside) for name in parts])
        if not isinstance(kind, str) or kind not in KEYWORDS:
            names = ", ".join(sorted(given - {"type"})) or f"type {kind!r}"
            advice = "; write anyOf, if no text fits two of them" if "oneOf" in given else ""
            self._refuse(where, f": {names} cannot be followed{advice}")
        if unknown := given - KEYWORDS[kind] - {"type"}:
            known = ", ".join(sorted(KEYWORDS[kind])) or "nothing"
            names = ", ".join(sorted(unknown))
            self._refuse(where, f": {names} cannot be followed; beside type {kind!r} it knows {known}")
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
            self._refuse(where, " has to be a list that is not empty")
        return value

    def _reference(self, name: Any, where: str, inside: tuple[str, ...]) -> str:
        place = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", name) if isinstance(name, str) else None
        target = None
        if place and isinstance(defined := self._root.get(place[1]), Mapping):
            target = defined.get(place[2].replace("~1", "/").replace("~0", "~"))
        if target is None:
            self._refuse(where, f": $ref {name!r} leads nowhere; it has to be #/$defs/NAME or #/definitions/NAME")
        if name in inside:
            self._refuse(where, f": {name} contains itself, and a finite automaton cannot follow that")
        return self.regex(target, f"{where}, {name}", (*inside, name))

    def _constants(self, values: Sequence[Any], schema: Mapping[str, Any], where: str) -> str:
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        for value in values:
            if kinds and not any(_is_of(value, kind) for kind in kinds):
                self._refuse(where, f": {value!r} is not of type {schema['type']!r}")
        try:
            return _any_of([_constant(value) for value in values])
        except (TypeError, ValueError) as error:
            self._refuse(where, f": a value is no JSON ({error})")

    def _bounds(self, schema: Mapping[str, Any], names: tuple[str, str], where: str, least: int) -> tuple[int, Any]:
        """The smallest and the largest number; None if there is no largest."""
        for name in names:
            value = schema.get(name)
            if name in schema and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                self._refuse(where, f": {name} has to be an int of at least {least}")
        low, high = schema.get(names[0], least), schema.get(names[1])
        if high is not None and high < low:
            self._refuse(where, f": {names[1]} is smaller than {names[0]}")
        return low, high

    def _digits(self, schema: Mapping[str, Any], part: str, where: str, before: int = 0) -> str:
        """How many digits there are behind the first ``before`` ones."""
        low, high = self._bounds(schema, (f"minDigits{part}", f"maxDigits{part}"), where, 1)
        return _times(low - before, None if high is None else high - before)

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
                self._refuse(where, f": format {schema['format']!r} is not known; these are: {', '.join(FORMATS)}")
            return f'"(?:{FORMATS[schema["format"]]})"'
        if "pattern" in schema:
            return f'"(?:{self._pattern(schema["pattern"], where)})"'
        return f'"{_CHARACTER}{_times(*self._bounds(schema, ("minLength", "maxLength"), where, 0))}"'

    def _pattern(self, pattern: Any, where: str) -> str:
        if not isinstance(pattern, str):
            self._refuse(where, ": its pattern has to be a text")
        pattern = _as_schemas_mean_it(without_anchors(pattern))
        byte_index(pattern, self._text)
        if _may_leave_the_string(pattern, self._text):
            reason = (
                ": its pattern may match what JSON has to escape (a quote, a backslash, a control character): "
                "write out the characters that may come, such as [a-z ]"
            )
            self._refuse(where, reason)
        return pattern

    def _array(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        if ("items" in schema) == ("prefixItems" in schema):
            self._refuse(where, ": say either items or prefixItems")
        low, high = self._bounds(schema, ("minItems", "maxItems"), where, 0)
        if "prefixItems" in schema:
            if {"minItems", "maxItems"} & schema.keys():
                reason = ": prefixItems has as many items as it names; minItems and maxItems cannot be followed"
                self._refuse(where, reason)
            parts = self._list(schema["prefixItems"], f"{where}: prefixItems")
            items = _COMMA.join(self.regex(part, f"{where}, {i}", inside) for i, part in enumerate(parts))
            return rf"\[{_SPACE}{items}{_SPACE}\]"
        item = self.regex(schema["items"], f"{where}, items", inside)
        return rf"\[{_SPACE}{_separated(item, low, high)}{_SPACE}\]"

    def _object(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> str:
        others, required = schema.get("additionalProperties"), schema.get("required", [])
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            self._refuse(where, ": properties have to be an object, and required a list")
        if not all(isinstance(name, str) for name in required):
            self._refuse(where, ": required has to be a list of names")
        if unknown := sorted(set(required) - properties.keys()):
            self._refuse(where, f": {', '.join(unknown)} is required and not among its properties")
        if "properties" not in schema:
            if not isinstance(others, Mapping):
                self._refuse(where, ": say its properties, or the schema of all of them (additionalProperties)")
            value = self.regex(others, f"{where}, additionalProperties", inside)
            members = _separated(f'"{_CHARACTER}*"{_SPACE}:{_SPACE}{value}', 0, None)
        elif others not in (None, False, True):
            self._refuse(where, ": beside properties, schemas of others cannot be followed")
        else:
            pairs = [
                (f"{_constant(name)}{_SPACE}:{_SPACE}{self.regex(value, f'{where}, {name}', inside)}", name in required)
                for name, value in properties.items()
            ]
            members = _members(pairs)
        return rf"\{{{_SPACE}{members}{_SPACE}\}}"


def _any_of(parts: Sequence[str]) -> str:
    return f"(?:{'|'.join(parts)})"


def _times(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _separated(item: str, low: int, high: int | None) -> str:
    """From ``low`` to ``high`` of ``item``."""
    if high == 0:
        return ""
    more = _times(max(low - 1, 0), None if high is None else high - 1)
    return f"(?:{item}(?:{_COMMA}{item}){more}){'' if low else '?'}"


def _members(pairs: Sequence[tuple[str, bool]]) -> str:
    """Pairs in their order; those that are not required may be missing."""
    behind_another, first = "", ""
    for pair, required in reversed(pairs):
        first = f"{pair}{behind_another}" if required else f"(?:{pair}{behind_another}|{first})"
        behind_another = f"{_COMMA}{pair}{behind_another}" if required else f"(?:{_COMMA}{pair})?{behind_another}"
    return f"(?:{first})"


def _constant(value: Any) -> str:
    """One JSON value."""
    if isinstance(value, Mapping):
        pairs = [f"{_constant(str(name))}{_SPACE}:{_SPACE}{_constant(item)}" for name, item in value.items()]
        return rf"\{{{_SPACE}{_COMMA.join(pairs)}{_SPACE}\}}"
    if isinstance(value, list | tuple):
        return rf"\[{_SPACE}{_COMMA.join(map(_constant, value))}{_SPACE}\]"
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a type, as JSON Schema has it."""
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


# JSON schemas mean ECMA-262's expressions, in which these are ASCII, and in a class && is an & twice.
_OTHERWISE = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    "&&": r"\&\&",
    "~~": r"\~\~",
}


def _as_schemas_mean_it(pattern: str) -> str:
    """The same expression as the automaton's builder reads it."""
    return re.sub(r"\\.|&&|~~", lambda found: _OTHERWISE.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _may_leave_the_string(pattern: str, text: str) -> bool:
    """Whether it matches any text with a character that JSON has to escape."""
    escaped = {*range(0x20), ord('"'), ord("\\")}
    return any(escaped & moves.keys() for moves in byte_index(f"(?:{pattern}){END}", text).get_transitions().values())
