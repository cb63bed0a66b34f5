"""Guides from JSON schemas.

Properties come in the order of the schema, and white space is that of ``json.dumps``: one space after a comma and a
colon.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.dialects import NAMED
from speccompile.guides.ecma import rust_pattern
from speccompile.guides.formats import keywords_of_format
from speccompile.guides.guide import Guide, compiled
from speccompile.guides.lookahead import without_lookaheads
from speccompile.guides.matcher import first_line
from speccompile.guides.rewriting import rewritten_schema
from speccompile.guides.tokens import guide_tokens, llguidance
from speccompile.utils.json_faults import json_fault

_LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
#: Keywords that restrict values in other dialects, and what to write instead. llguidance, as JSON Schema requires,
#: ignores unknown keywords.
_OTHER_DIALECTS: Mapping[str, str] = {
    "extends": "allOf",
    "disallow": "enum",
    "divisibleBy": "multipleOf",
    **dict.fromkeys(("minDigits", "maxDigits"), "minimum and maximum"),
    **{f"{end}Digits{part}": "pattern" for end in ("min", "max") for part in ("Integer", "Fraction", "Exponent")},
}
#: Beginnings of llguidance's errors for schemas that can be rewritten.
_REWRITTEN = ("Unimplemented keys", "oneOf constraints", "Expected positive integer")
#: Keywords whose value is not a schema.
_VALUES = frozenset({"const", "enum", "default", "examples", "example", "required", "dependentRequired"})


def json_schema_guide(
    schema: Mapping[str, Any] | str | bool | type, tokenizer: PreTrainedTokenizerBase, *, strict: bool = True
) -> Guide:
    """Build a guide for JSON that is valid for ``schema``.

    Args:
        schema: a dict, JSON text, True for any JSON, or a class with ``model_json_schema`` (pydantic's).
        tokenizer: the model's tokenizer, a fast one.
        strict: refuse a keyword that cannot be followed. Otherwise it is left out, and ``Guide.loosened`` names it.

    Raises:
        InvalidGuide: the schema is not valid, has a keyword that cannot be followed, or matches nothing.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    text = schema_text(schema)
    followed, loosened = followed_schema(text, strict=strict)
    return compiled(text, llguidance().LLMatcher.grammar_from_json_schema(followed), guide_tokens(tokenizer), loosened)


def followed_schema(text: str, *, strict: bool = True) -> tuple[str, tuple[str, ...]]:
    """Return the schema ``text`` with the options by which llguidance follows it, as part of a larger grammar too, and
    the parts of the schema that are not followed.

    Raises:
        InvalidGuide: the cases of :func:`json_schema_guide`, except that nothing matches the schema.
    """
    try:
        return _followed(text, strict=strict)
    except RecursionError as error:
        raise InvalidGuide(what="the schema", reason="it nests too deeply") from error


def _followed(text: str, *, strict: bool) -> tuple[str, tuple[str, ...]]:
    left_out: list[str] = []
    schema = _translated(json.loads(text), text, strict, left_out)
    followed = _with_options(schema)
    if (problem := _problem(followed)) is None:
        return followed, tuple(dict.fromkeys(left_out))
    if problem.startswith(_REWRITTEN):
        try:
            followed = _with_options(rewritten_schema(schema))
            problem = _problem(followed)
        except InvalidGuide as error:
            problem = error.fields["reason"]
    if problem is not None and strict:
        raise InvalidGuide(what=text, reason=problem)
    if problem is not None:
        followed = _loosened(schema, text, problem, left_out)
    return followed, tuple(dict.fromkeys(left_out))


def _loosened(schema: dict[str, Any], text: str, problem: str, left_out: list[str]) -> str:
    """``schema`` without the parts that cannot be followed, which are added to ``left_out``.

    Raises:
        InvalidGuide: for ``problem``, which is not that of a keyword.
    """
    own: list[str] = []
    try:
        candidates = [rewritten_schema(schema, own), schema]
    except InvalidGuide:
        candidates = [schema]
    for candidate in candidates:
        followed = _with_options(candidate, lenient=True)
        failed, messages = _validated(followed)
        if not failed:
            left_out += [*(own if candidate is not schema else ()), *map(first_line, messages)]
            left_out += [] if left_out else [problem]
            return followed
    raise InvalidGuide(what=text, reason=problem)


def _with_options(schema: Mapping[str, Any], **options: bool) -> str:
    return json.dumps({**schema, "x-guidance": {**_LAYOUT, **options}})


def schema_text(schema: Any) -> str:
    """The JSON text of a schema.

    Raises:
        InvalidGuide: it is not a schema.
    """
    method = getattr(schema, "model_json_schema", None)
    value = method() if callable(method) else schema
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except RecursionError as error:
            raise InvalidGuide(what=repr(schema), reason="it nests too deeply") from error
        except ValueError as error:
            raise InvalidGuide(what=repr(schema), reason=f"it is not JSON: {json_fault(error)}") from error
    if not isinstance(value, Mapping | bool):
        raise InvalidGuide(what=repr(schema), reason="a JSON schema must be an object, or true for any JSON")
    if value is False:
        raise InvalidGuide(what="false", reason="no value is valid for it")
    try:
        return json.dumps({} if value is True else value, allow_nan=False)
    except RecursionError as error:
        raise InvalidGuide(what="the schema", reason="it nests too deeply") from error
    except (TypeError, ValueError) as error:
        reason = json_fault(error) if isinstance(error, ValueError) else str(error)
        raise InvalidGuide(what="the schema", reason=f"it is not JSON: {reason}") from error


def _problem(schema: str) -> str | None:
    """The reason why llguidance does not follow ``schema``; None if it does."""
    failed, messages = _validated(schema)
    # llguidance names one of its options, which would accept values that are not valid.
    return first_line(messages[0]).split(" Enable 'coerce_one_of'")[0] if failed else None


def _validated(schema: str) -> tuple[bool, list[str]]:
    """Whether llguidance refuses ``schema``, and its error or its warnings."""
    matcher = llguidance().LLMatcher
    failed, messages = matcher.validate_grammar_with_warnings(matcher.grammar_from_json_schema(schema))
    return bool(failed), list(messages)


def _translated(schema: Any, text: str, strict: bool, left_out: list[str]) -> Any:
    """``schema`` with patterns that llguidance reads as they are meant. Unless ``strict``, keywords that cannot be
    followed are added to ``left_out``. ``text`` names the whole in errors."""
    if isinstance(schema, list):
        return [_translated(item, text, strict, left_out) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    conditions: list[dict[str, Any]] = []
    unfollowed = set()
    for name, value in schema.items():
        if name == "uniqueItems" and value is False:
            continue
        try:
            if name in _OTHER_DIALECTS:
                reason = f"{name} is not a keyword of JSON Schema 2020-12; write {_OTHER_DIALECTS[name]}"
                raise InvalidGuide(what=text, reason=reason)
            if name == "pattern" and isinstance(value, str):
                *ahead, result[name] = map(_pattern, without_lookaheads(value))
                conditions += [{"pattern": item} for item in ahead]
            elif name == "format" and isinstance(value, str):
                conditions.append(keywords_of_format(value))
            elif name == "patternProperties" and isinstance(value, dict):
                own = {_pattern(key): _translated(item, text, strict, left_out) for key, item in value.items()}
                result[name] = own
            elif name in NAMED and isinstance(value, dict):
                result[name] = {key: _translated(item, text, strict, left_out) for key, item in value.items()}
            else:
                result[name] = value if name in _VALUES else _translated(value, text, strict, left_out)
        except InvalidGuide as error:
            if strict:
                raise InvalidGuide(what=text, reason=error.fields["reason"]) from error
            left_out.append(f"{name}: {error.fields['reason']}")
            unfollowed.add(name)
    for condition in conditions:
        if not condition.keys() & result.keys():
            result |= condition
        elif isinstance(result.get("allOf", []), list):
            result["allOf"] = [*result.get("allOf", []), condition]
    if "patternProperties" in unfollowed:
        # These properties are now additional ones.
        result.pop("additionalProperties", None)
    return result


def _pattern(pattern: str) -> str:
    """The translation of ``pattern``.

    Raises:
        InvalidGuide: llguidance does not follow it.
    """
    translated = rust_pattern(pattern)
    if problem := _problem(json.dumps({"type": "string", "pattern": translated})):
        raise InvalidGuide(what=pattern, reason=f"pattern {pattern!r}: {problem}")
    return translated
