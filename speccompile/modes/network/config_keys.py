"""The keys of a published head's config.json, each checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidHead, error_line

#: Where vLLM looks for the mask token of a drafter that drafts all tokens at once.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class ConfigKeys:
    """A config. A key that is null counts as absent: speculators writes null for what it leaves open.

    Args:
        keys: of the file.
        name: what messages call the checkpoint.
    """

    keys: Mapping[str, Any]
    name: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, ``default`` if it is missing or null."""
        value = self.keys.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Raises InvalidHead: it is not an int of at least ``least``."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.invalid(key, value, "a size" if least else "a token")
        return value

    def number(self, key: str, default: float) -> float:
        """Raises InvalidHead: it is not a number above 0."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.invalid(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Raises InvalidHead: it is neither true nor false."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """Indices of layers; none where they are absent.

        Raises:
            InvalidHead: it is not a list of ints.
        """
        value = self.get(key, [])
        good = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if not good:
            raise self.invalid(key, value, "a list of layers")
        return tuple(value)

    def kinds(self, key: str, count: int) -> list[str] | None:
        """``full_attention`` or ``sliding_attention`` of each of ``count`` layers; None where they are absent.

        Raises:
            InvalidHead: a layer is of another kind, or of none.
        """
        value, known = self.get(key), ("full_attention", "sliding_attention")
        good = value is None or (isinstance(value, list) and len(value) >= count and not set(value[:count]) - {*known})
        if not good:
            reason = f"its config says {key}={value!r}, which has to name one of {list(known)} for each layer"
            raise InvalidHead(source=self.name, reason=reason)
        return None if value is None else value[:count]

    def part(self, key: str) -> dict[str, Any]:
        """Keys below a key; none where it is absent.

        Raises:
            InvalidHead: it is not an object.
        """
        value = self.keys.get(key) or {}
        if not isinstance(value, dict):
            raise self.invalid(key, value, "an object")
        return value

    def rope(self) -> dict[str, Any]:
        """transformers 5 writes ``rope_parameters``, which ``rope_theta`` and ``rope_scaling`` were before. Without any
        the base is 10000: heads do not inherit the target's.

        Raises:
            InvalidHead: they differ between kinds of layers, or are not an object.
        """
        given, theta = self.keys.get("rope_parameters") or self.keys.get("rope_scaling") or {}, 10000.0
        if not isinstance(given, dict):
            reason = f"its config has the rotary parameters {given!r}, which are not an object"
            raise InvalidHead(source=self.name, reason=reason)
        theta = self.number("rope_theta", theta)
        # As speculators does where a config has parameters by kind of layer (``flatten_rope_parameters``).
        rope = dict(given["sliding_attention"] if isinstance(given.get("sliding_attention"), dict) else given)
        if by_kind := sorted(key for key, value in rope.items() if isinstance(value, dict)):
            kinds = ", ".join(by_kind)
            reason = f"its config has rotary parameters by kind of layer ({kinds}), which are not supported"
            raise InvalidHead(source=self.name, reason=reason)
        # Of old files.
        kind = rope.pop("type", None)
        rope.setdefault("rope_type", kind or "default")
        # Image models have positions of three dimensions, which are equal for tokens of text.
        rope.pop("mrope_section", None)
        rope.pop("mrope_interleaved", None)
        if rope["rope_type"] == "mrope":
            rope["rope_type"] = "default"
        rope.setdefault("rope_theta", theta)
        return rope

    def invalid(self, key: str, value: Any, what: str) -> InvalidHead:
        """The error for a value that is not valid; ``what`` states what it must be."""
        return InvalidHead(source=self.name, reason=f"its config says {key}={value!r}, which has to be {what}")


def read_keys(path: Path, name: str) -> dict[str, Any]:
    """Of a file.

    Raises:
        InvalidHead: it cannot be read, or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidHead(source=name, reason=f"{path.name} cannot be read: {error_line(error)}") from error
    if not isinstance(found, dict):
        raise InvalidHead(source=name, reason=f"{path.name} is not a JSON object")
    return found
