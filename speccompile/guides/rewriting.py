"""Rewrites JSON schemas with keywords that llguidance does not have into schemas without them.

A schema becomes a union of cases in which only keywords remain that llguidance follows: ``if`` has one where it is
valid and one where it is not, ``dependentRequired`` one without the property and one with both, and so on. The opposite
of a schema, for ``not``, ``else`` and ``oneOf``, is the union of the opposites of its keywords.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from speccompile.errors import InvalidGuide
from speccompile.guides.cases import (
    Case,
    any_of,
    both,
    case_of,
    close_items,
    close_properties,
    having,
    lacking,
    schema_of,
)
from speccompile.guides.dialects import current_schema, subschemas
from speccompile.guides.disjoint import are_disjoint
from speccompile.guides.opposites import names_schema, opposites

#: Bound of the work for one schema, a second or two: how often a part of it is read.
MOST_READ = 20_000
#: Keywords of this module, in groups that belong together. llguidance has ``oneOf`` for options of which it sees that
#: they do not overlap.
_GROUPS = (
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    *((name,) for name in ("not", "oneOf", "dependentRequired", "dependentSchemas", "propertyNames")),
    *((name,) for name in ("unevaluatedProperties", "unevaluatedItems")),
)
REWRITTEN = frozenset(name for group in _GROUPS for name in group)
#: Keywords with schemas that hold for the same value.
_IN_PLACE = REWRITTEN | {"allOf", "anyOf", "$ref"}
#: Keywords that restrict values by themselves, or their properties and items. Others are annotations and definitions.
_RESTRICTING = frozenset(
    {
        *("type", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "prefixItems", "items"),
        *("minProperties", "maxProperties", "required", "properties", "patternProperties", "additionalProperties"),
    }
)
#: Keywords whose value maps names to schemas, is a list of schemas, or is a schema.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LISTED = frozenset({"allOf", "anyOf", "prefixItems"})
_SINGLE = frozenset({"items", "additionalProperties"})
_OF_PARTS = _SINGLE | {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}


def rewritten_schema(schema: dict[str, Any], left_out: list[str] | None = None) -> dict[str, Any]:
    """Return a schema for the same values without the keywords that llguidance does not have.

    Args:
        left_out: keywords that cannot be expressed by others are left out, and their reasons are added here. None
            refuses them.

    Raises:
        InvalidGuide: a keyword cannot be expressed by others.
    """
    plain = current_schema(schema)
    result = _Rewriting(plain, left_out).rewritten(plain)
    return result if isinstance(result, dict) else {"not": {}}


class _Rewriting:
    def __init__(self, root: dict[str, Any], left_out: list[str] | None) -> None:
        self._root, self._left_out = root, left_out
        # Parts are written at several places, so the work for nested ones could multiply.
        self._read = 0
        # References in place that are being followed: a schema that refers to itself in place has no end.
        self._followed: list[str] = []

    def rewritten(self, schema: Any) -> Any:
        """``schema`` and those within it. Keywords that llguidance follows stay at their places, where references
        point to them."""
        if not isinstance(schema, dict):
            return schema
        kept = {name: self._within(name, value) for name, value in schema.items() if name not in REWRITTEN}
        own = {name: value for name, value in schema.items() if name in REWRITTEN}
        if not own:
            return kept
        try:
            found = [self._expressed(own, schema)]
        except InvalidGuide:
            if self._left_out is None:
                raise
            found = self._as_far_as_possible(own, schema, self._left_out)
        # Properties come in the order in which they are named first.
        conditions = [*kept.pop("allOf", []), *(item for item in found if item != {})]
        return kept | {"allOf": conditions} if conditions else kept

    def _expressed(self, own: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
        """A schema for the keywords ``own`` of ``schema``."""
        annotated = any(name.startswith("unevaluated") for name in own)
        return schema_of(self.cases(schema if annotated else own, annotated=annotated))

    def _as_far_as_possible(self, own: Mapping[str, Any], schema: Mapping[str, Any], left_out: list[str]) -> list[Any]:
        """Schemas for those of the keywords ``own`` that can be expressed."""
        found = []
        for group in _GROUPS:
            keywords = {name: own[name] for name in group if name in own}
            try:
                found += [self._expressed(keywords, schema)] if keywords else []
            except InvalidGuide as error:
                left_out.append(f"{', '.join(keywords)}: {error.fields['reason']}")
        return found

    def _count(self) -> None:
        self._read += 1
        if self._read > MOST_READ:
            raise InvalidGuide(what="the schema", reason="it has too many cases")

    def _within(self, name: str, value: Any) -> Any:
        if name in _NAMED and isinstance(value, dict):
            return {key: self.rewritten(item) for key, item in value.items()}
        if name in _LISTED and isinstance(value, list):
            return [self.rewritten(item) for item in value]
        return self.rewritten(value) if name in _SINGLE else value

    def cases(self, schema: Any, *, annotated: bool = False) -> list[Case]:
        """The values of ``schema``. What they evaluate is only complete if it is ``annotated``."""
        self._count()
        if isinstance(schema, bool):
            return [Case()] if schema else []
        annotated = annotated or any(name.startswith("unevaluated") for name in schema)
        own = {name: self._within(name, value) for name, value in schema.items() if name in _RESTRICTING}
        found = [case_of(own)]
        for options in self._applied(schema, annotated=annotated):
            found = both(found, options)
        for name, close in (("unevaluatedItems", close_items), ("unevaluatedProperties", close_properties)):
            if name in schema:
                found = [close(case, self.rewritten(schema[name])) for case in found]
        return found

    def _applied(self, schema: Mapping[str, Any], *, annotated: bool) -> list[list[Case]]:
        """The unions of cases of the keywords in place; all of them hold."""
        found = [self.cases(item, annotated=annotated) for item in schema.get("allOf", ())]
        if "anyOf" in schema:
            options = [self.cases(item, annotated=annotated) for item in schema["anyOf"]]
            found.append(any_of(options, annotated=annotated))
        if "oneOf" in schema:
            found.append(self._one_of(schema["oneOf"], annotated=annotated))
        if "not" in schema:
            found.append(self.opposite(schema["not"]))
        if "if" in schema:
            holds = both(
                self.cases(schema["if"], annotated=annotated),
                self.cases(schema.get("then", True), annotated=annotated),
            )
            fails = both(self.opposite(schema["if"]), self.cases(schema.get("else", True), annotated=annotated))
            # Without then and else the condition only matters for what it evaluates.
            found.append(holds + fails if annotated or {"then", "else"} & schema.keys() else [Case()])
        for name, needed in schema.get("dependentRequired", {}).items():
            found.append([lacking(name), Case(({"required": [name, *needed]},))] if needed else [Case()])
        for name, item in schema.get("dependentSchemas", {}).items():
            found.append([lacking(name), *both([having(name, True)], self.cases(item, annotated=annotated))])
        if (names := names_schema(schema.get("propertyNames", True))) is not None:
            found.append([Case((names,))])
        if "contains" in schema:
            found.append(_containing(schema, annotated=annotated))
        if "$ref" in schema:
            found.append(self._referred(schema["$ref"]) if annotated else [Case(({"$ref": schema["$ref"]},))])
        return found

    def _one_of(self, options: Sequence[Any], *, annotated: bool) -> list[Case]:
        found: list[Case] = []
        try:
            for index, option in enumerate(options):
                only = self.cases(option, annotated=annotated)
                for other in (*options[:index], *options[index + 1 :]):
                    if not are_disjoint(option, other, self._target, self._count):
                        only = both(only, self.opposite(other))
                found += only
        except InvalidGuide:
            if annotated:
                raise
            # llguidance may see that they do not overlap.
            return [Case(({"oneOf": [self.rewritten(option) for option in options]},))]
        return found

    def _referred(self, reference: str) -> list[Case]:
        with _Following(self._followed, reference):
            return self.cases(self._target(reference), annotated=True)

    def _target(self, reference: str) -> Any:
        """The schema to which a reference within the document points."""
        if not reference.startswith("#"):
            reason = f"the reference {reference!r} leads to another document, which is not read"
            raise InvalidGuide(what="the schema", reason=reason)
        if reference[1:] and not reference.startswith("#/"):
            return _anchored(self._root, reference[1:])
        found: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise InvalidGuide(what="the schema", reason=f"{reference!r} points to nothing") from error
        return found

    def opposite(self, schema: Any) -> list[Case]:
        """The values for which ``schema`` is not valid. They evaluate nothing."""
        self._count()
        if isinstance(schema, bool):
            return [] if schema else [Case()]
        return [case.unevaluating() for name, value in schema.items() for case in self._opposite(name, value, schema)]

    def _opposite(self, name: str, value: Any, schema: Mapping[str, Any]) -> list[Case]:
        """The values that are not valid because of one keyword."""
        if name not in _RESTRICTING | _IN_PLACE or name in ("then", "else", "minContains", "maxContains"):
            return []
        if name == "allOf":
            return [case for item in value for case in self.opposite(item)]
        if name == "anyOf":
            return self._none_of(value)
        if name == "oneOf":
            several = [
                case
                for index, first in enumerate(value)
                for second in value[index + 1 :]
                for case in both(self.cases(first), self.cases(second))
            ]
            return [*self._none_of(value), *several]
        if name == "not":
            return self.cases(value)
        if name == "if":
            wrong = both(self.cases(value), self.opposite(schema.get("then", True)))
            return [*wrong, *both(self.opposite(value), self.opposite(schema.get("else", True)))]
        if name == "$ref":
            with _Following(self._followed, value):
                return self.opposite(self._target(value))
        if name == "properties":
            return [having(key, schema_of(cases)) for key, item in value.items() if (cases := self.opposite(item))]
        if name == "dependentRequired":
            return [having(key, True, without=item) for key, needed in value.items() for item in needed if item != key]
        if name == "dependentSchemas":
            return [case for key, item in value.items() for case in both([having(key, True)], self.opposite(item))]
        if name == "prefixItems":
            return [case for index, item in enumerate(value) for case in self._opposite_item(index, item)]
        if name in _OF_PARTS and self.opposite(value) == []:
            # Every property or item is valid for it.
            return []
        return [Case((item,)) for item in opposites(name, value)]

    def _none_of(self, options: Sequence[Any]) -> list[Case]:
        found = [Case()]
        for option in options:
            found = both(found, self.opposite(option))
        return found

    def _opposite_item(self, index: int, schema: Any) -> list[Case]:
        cases = self.opposite(schema)
        prefix = [*([{}] * index), schema_of(cases)]
        return [Case(({"type": "array", "minItems": index + 1, "prefixItems": prefix},))] if cases else []


class _Following:
    """A reference in place is followed within this context.

    Raises:
        InvalidGuide: it is being followed already.
    """

    def __init__(self, followed: list[str], reference: str) -> None:
        self._followed, self._reference = followed, reference

    def __enter__(self) -> None:
        if self._reference in self._followed:
            reason = (
                f"the reference {self._reference!r} leads to itself within keywords that need its opposite or what "
            )
            raise InvalidGuide(what="the schema", reason=f"{reason}it evaluates")
        self._followed.append(self._reference)

    def __exit__(self, *_: object) -> None:
        self._followed.pop()


def _anchored(schema: Any, anchor: str) -> Any:
    """The schema within ``schema`` that has this ``$anchor``.

    Raises:
        InvalidGuide: no schema has it.
    """
    for item in subschemas(schema):
        if item.get("$anchor") == anchor:
            return item
    raise InvalidGuide(what="the schema", reason=f"nothing has the anchor {anchor!r}")


def _containing(schema: Mapping[str, Any], *, annotated: bool) -> list[Case]:
    """Arrays of which any item is one that ``contains`` counts, or none is."""
    least, wanted = schema.get("minContains", 1), schema["contains"]
    if wanted is True or wanted == {}:
        bounds = {"minItems": least} | ({"maxItems": schema["maxContains"]} if "maxContains" in schema else {})
        return [Case((bounds,), all_items=True)]
    if wanted is False:
        return [Case() if least == 0 else Case(tuple(opposites("type", "array")))]
    if least == 0 and "maxContains" not in schema and not annotated:
        return [Case()]
    raise InvalidGuide(what="the schema", reason="contains with a schema cannot be followed")
