"""A schema as a union of cases: each is a list of schemas that all hold, with what they evaluate.

Evaluated properties and items are those that ``unevaluatedProperties`` and ``unevaluatedItems`` do not restrict (JSON
Schema 2020-12, section 11).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from speccompile.errors import InvalidGuide
from speccompile.guides.disjoint import TYPES, types_of

#: Bound of the cases of one schema. More would need seconds to compile.
MOST_CASES = 256


@dataclass(frozen=True)
class Case:
    """Values for which all ``schemas`` are valid.

    Args:
        schemas: JSON schemas.
        names, patterns: evaluated properties, by their names, and by patterns of names.
        all_properties: whether all properties are evaluated.
        items: how many items are evaluated, from the first on.
        all_items: whether all items are evaluated.
    """

    schemas: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    all_properties: bool = False
    items: int = 0
    all_items: bool = False

    def __and__(self, other: Case) -> Case:
        """The values of both."""
        return Case(
            # By text: Python regards 0 and False as equal.
            schemas=tuple({json.dumps(item): item for item in self.schemas + other.schemas}.values()),
            names=tuple(dict.fromkeys(self.names + other.names)),
            patterns=tuple(dict.fromkeys(self.patterns + other.patterns)),
            all_properties=self.all_properties or other.all_properties,
            items=max(self.items, other.items),
            all_items=self.all_items or other.all_items,
        )

    def unevaluating(self) -> Case:
        """Return a case of the same values that evaluates nothing."""
        return Case(self.schemas)

    def evaluates_no_more_than(self, other: Case) -> bool:
        """Whether each property and item that this case evaluates is also evaluated by ``other``."""
        return (
            (other.all_properties or not self.all_properties)
            and (other.all_properties or {*self.names} <= {*other.names})
            and (other.all_properties or {*self.patterns} <= {*other.patterns})
            and (other.all_items or (not self.all_items and self.items <= other.items))
        )


def case_of(own: dict[str, Any]) -> Case:
    """The case of keywords that are not in place, and what they evaluate."""
    return Case(
        schemas=(own,) if own else (),
        names=tuple(own.get("properties", ())),
        patterns=tuple(own.get("patternProperties", ())),
        all_properties="additionalProperties" in own,
        items=len(own.get("prefixItems", ())),
        all_items="items" in own,
    )


def having(name: str, schema: Any, without: str | None = None) -> Case:
    """Objects that have a property, valid for ``schema``."""
    properties = {name: schema} if without is None else {name: schema, without: False}
    return Case(({"type": "object", "properties": properties, "required": [name]},))


def lacking(name: str) -> Case:
    """Values that have no property of that name."""
    return Case(({"properties": {name: False}},))


def close_items(case: Case, schema: Any) -> Case:
    """The values of ``case`` whose items are valid for ``schema`` where nothing else evaluates them."""
    if case.all_items:
        return case
    own = {"prefixItems": [{}] * case.items, "items": schema} if case.items else {"items": schema}
    return case & Case((own,), all_items=True)


def close_properties(case: Case, schema: Any) -> Case:
    """The values of ``case`` whose properties are valid for ``schema`` where nothing else evaluates them."""
    if case.all_properties:
        return case
    own: dict[str, Any] = {"properties": {name: {} for name in case.names}} if case.names else {}
    own |= {"patternProperties": {pattern: {} for pattern in case.patterns}} if case.patterns else {}
    return case & Case((own | {"additionalProperties": schema},), all_properties=True)


Cases = Sequence[Case]


def both(first: Cases, second: Cases) -> list[Case]:
    """The intersection of two unions of cases, without those that have no type in common."""
    found = (one & other for one in first for other in second)
    return _limited([case for case in found if frozenset.intersection(TYPES, *map(types_of, case.schemas))])


def any_of(options: Sequence[Cases], *, annotated: bool) -> list[Case]:
    """The union of ``options``.

    Args:
        annotated: what is evaluated matters. Then a value that is valid for several options has a separate case,
            with what all of them evaluate, unless another case with these values evaluates as much.
    """
    found = _limited([case for cases in options for case in cases])
    if not annotated or all(one.evaluates_no_more_than(other) for one in found for other in found):
        return found
    if 2 ** len(options) > MOST_CASES:
        raise InvalidGuide(what="the schema", reason=f"anyOf beside unevaluated parts has more than {MOST_CASES} cases")
    for count in range(2, len(options) + 1):
        for chosen in itertools.combinations(options, count):
            together: list[Case] = [Case()]
            for cases in chosen:
                together = both(together, cases)
            for case in together:
                wider = [item for item in found if {*map(repr, item.schemas)} <= {*map(repr, case.schemas)}]
                if not any(case.evaluates_no_more_than(item) for item in wider):
                    found = _limited([*found, case])
    return found


def schema_of(cases: Cases) -> Any:
    """A schema for which the values of all ``cases`` are valid, and no others."""
    options = [list(case.schemas) for case in cases]
    if not options:
        return False
    if [] in options:
        return {}
    schemas = [schemas[0] if len(schemas) == 1 else {"allOf": schemas} for schemas in options]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _limited(cases: list[Case]) -> list[Case]:
    if len(cases) > MOST_CASES:
        raise InvalidGuide(what="the schema", reason=f"it has more than {MOST_CASES} cases")
    return cases
