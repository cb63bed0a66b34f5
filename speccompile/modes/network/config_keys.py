"""Checked reading of the keys of a published head's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidHead, error_line
from speccompile.utils.numbers import is_int, is_real

#: The keys in which vLLM expects the mask token of a drafter that drafts all tokens at once.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class ConfigKeys:
    """A config. A null value is read as an absent key: speculators writes null for options without a value.

    Args:
        keys: the file's keys and values.
        name: the checkpoint's name, for messages.
    """

    keys: Mapping[str, Any]
    name: str

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; ``default`` if it is missing or null."""
        value = self.keys.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """The value of ``key``, a size.

        Raises:
            InvalidHead: it is not an int of at least ``least``.
        """
        value = self.get(key, default)
        if not is_int(value) or value < least:
            raise self.invalid(key, value, "a size" if least else "a token")
        return value

    def number(self, key: str, default: float) -> float:
        """The value of ``key``, a number.

        Raises:
            InvalidHead: it is not a number above 0.
        """
        value = self.get(key, default)
        if not is_real(value) or not value > 0:
            raise self.invalid(key, value, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """The value of ``key``, true or false; false if it is absent.

        Raises:
            InvalidHead: it is neither.
        """
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def layers(self, key: str) -> tuple[int, ...]:
        """The value of ``key``, indices of layers; empty if it is absent.

        Raises:
            InvalidHead: it is not a list of ints.
        """
        value = self.get(key, [])
        good = isinstance(value, list) and all(is_int(item) for item in value)
        if not good:
            raise self.invalid(key, value, "a list of layers")
        return tuple(value)

    def kinds(self, key: str, count: int) -> list[str] | None:
        """The value of ``key``, ``full_attention`` or ``sliding_attention`` for each of ``count`` layers; None if it is
        absent.

        Raises:
            InvalidHead: a layer has another kind, or no kind.
        """
        value, known = self.get(key), ("full_attention", "sliding_attention")
        good = value is None or (isinstance(value, list) and len(value) >= count and not set(value[:count]) - {*known})
        if not good:
            reason = f"{key} in its config must name one of {list(known)} for each layer, got {value!r}"
            raise InvalidHead(source=self.name, reason=reason)
        return None if value is None else value[:count]

    def part(self, key: str) -> dict[str, Any]:
        """The value of ``key``, an object; empty if it is absent.

        Raises:
            InvalidHead: it is not an object.
        """
        value = self.keys.get(key) or {}
        if not isinstance(value, dict):
            raise self.invalid(key, value, "an object")
        return value

    def rope(self) -> dict[str, Any]:
        """The rotary parameters, in the form of transformers' ``rope_parameters``.

        transformers 5 writes ``rope_parameters``. Older versions write ``rope_theta`` and ``rope_scaling``. Without any
        of them the base is 10000: heads do not inherit the target's parameters.

        Raises:
            InvalidHead: they differ between kinds of layers, or are not an object.
        """
        given, theta = self.keys.get("rope_parameters") or self.keys.get("rope_scaling") or {}, 10000.0
        if not isinstance(given, dict):
            reason = f"the rotary parameters in its config must be an object, got {given!r}"
            raise InvalidHead(source=self.name, reason=reason)
        theta = self.number("rope_theta", theta)
        # speculators chooses the same entry if a config has parameters by kind of layer (``flatten_rope_parameters``).
        rope = dict(given["sliding_attention"] if isinstance(given.get("sliding_attention"), dict) else given)
        if by_kind := sorted(key for key, value in rope.items() if isinstance(value, dict)):
            kinds = ", ".join(by_kind)
            reason = f"its config has rotary parameters by kind of layer ({kinds}), which are not supported"
            raise InvalidHead(source=self.name, reason=reason)
        # The key of old files.
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
        """The error for a value that is not valid. ``what`` is a description of valid values."""
        return InvalidHead(source=self.name, reason=f"{key} in its config must be {what}, got {value!r}")


def read_keys(path: Path, name: str) -> dict[str, Any]:
    """The keys of a config file.

    Args:
        name: the checkpoint's name, for messages.

    Raises:
        InvalidHead: the file cannot be read, or is not a JSON object.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidHead(source=name, reason=f"{path.name} cannot be read: {error_line(error)}") from error
    if not isinstance(found, dict):
        raise InvalidHead(source=name, reason=f"{path.name} is not a JSON object")
    return found
