"""Random JSON schemas whose values are bounded, and a check of values that shares no code with the guides."""

from __future__ import annotations

import random
import re
from typing import Any


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object whose values nest up to ``depth`` levels. Texts and lists are bounded, so that calls come to an end."""
    kinds = ["integer", "boolean", "string", "enum", "pattern"] + ["object", "array"] * bool(depth)
    kind = rng.choice(kinds) if depth < 2 else "object"
    if kind == "integer":
        bound = 10 ** rng.randint(1, 3) - 1
        return {"type": "integer", "minimum": -bound, "maximum": bound}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 4)}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b", 1, None, True, 2.5], k=rng.randint(1, 3))}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[ab]{2}$", "^(x|yz)$", "^[0-9]{1,3}$"])}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 2}
    if kind == "object":
        names = rng.sample(["a", "b", "cd", "é"], k=rng.randint(1, 3))
        properties = {name: random_schema(rng, depth - 1) for name in names}
        required = names[: rng.randint(0, len(names))]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether ``value`` is one of a schema of :func:`random_schema`."""
    if "enum" in schema:
        return any(type(value) is type(item) and value == item for item in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "string":
        if not isinstance(value, str):
            return False
        return (
            bool(re.fullmatch(schema["pattern"], value)) if "pattern" in schema else len(value) <= schema["maxLength"]
        )
    if kind == "array":
        good = isinstance(value, list) and len(value) <= schema["maxItems"]
        return good and all(is_valid(item, schema["items"]) for item in value)
    properties = schema["properties"]
    good = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
    return good and all(is_valid(item, properties[name]) for name, item in value.items())
