"""Options of policies: checks of their values, and their text form (``ema:alpha=0.3,candidates=0/3/7``)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from speccompile.errors import InvalidPolicy, UnknownTier, shown
from speccompile.utils.numbers import is_int, is_real

T = TypeVar("T")

#: Largest value: rows and draft lengths are 64-bit integers in the arena.
LARGEST = 2**63 - 1


def by_rows(value: T | Mapping[int, T]) -> Mapping[int, T]:
    """Return ``value`` as a mapping from the fewest live rows. A single value is valid from one row on."""
    return value if isinstance(value, Mapping) else {1: value}


def reached(values: Mapping[int, T], rows: int) -> T:
    """Return the value whose range contains ``rows``. For no rows it is the value of the first range."""
    return values[max((start for start in values if start <= rows), default=min(values))]


def check_number(
    policy: str, name: str, value: Any, *, above: float = -math.inf, most: float = math.inf, least: float = -math.inf
) -> None:
    """Raise InvalidPolicy unless ``value`` is a finite number within the bounds."""
    good = is_real(value) and math.isfinite(value)
    if not (good and above < value <= most and value >= least):
        bounds = [f"above {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
        bounds += [f"at most {most:g}"] * (most < math.inf)
        wanted = " ".join(["a number", " and ".join(bounds)]).strip()
        raise InvalidPolicy(policy=policy, reason=f"{name}={shown(value)} must be {wanted}")


def check_whole(policy: str, name: str, value: Any, least: int) -> None:
    """Raise InvalidPolicy unless ``value`` is an int of at least ``least`` and at most 2**63 - 1."""
    if not is_int(value) or value < least:
        raise InvalidPolicy(policy=policy, reason=f"{name}={shown(value)} must be a whole number of at least {least}")
    if value > LARGEST:
        raise InvalidPolicy(policy=policy, reason=f"{name}={shown(value)} must be at most 2**63 - 1")


def check_by_rows(policy: str, name: str, value: Any, *, least: float = -math.inf) -> None:
    """Check a number, or a mapping with a number for each range of row counts.

    Raises:
        InvalidPolicy: a number is not at least ``least``, or a mapping lacks an entry for one row.
    """
    for rows, one in by_rows(value).items():
        check_whole(policy, f"rows of {name}", rows, 1)
        check_number(policy, name, one, least=least)
    if 1 not in by_rows(value):
        raise InvalidPolicy(policy=policy, reason=f"{name}={shown(value)} has no entry for one row")


def check_candidates(policy: str, candidates: Any, *, by_rows: bool) -> None:
    """Check a list of draft lengths, None, or with ``by_rows`` a mapping with a list for each range of row counts.

    Raises:
        InvalidPolicy: a list is empty or does not ascend, or a mapping lacks an entry for one row.
    """

    def refuse(reason: str) -> None:
        raise InvalidPolicy(policy=policy, reason=f"candidates={shown(candidates)}: {reason}")

    if candidates is None:
        return
    if isinstance(candidates, Mapping):
        if not by_rows:
            refuse("it must be one list of draft lengths, for all numbers of rows")
        if 1 not in candidates:
            refuse("it has no entry for one row")
        for rows in candidates:
            check_whole(policy, "rows of candidates", rows, 1)
    for one in candidates.values() if isinstance(candidates, Mapping) else [candidates]:
        if not isinstance(one, tuple | list) or not one:
            refuse("it must be a list of draft lengths that is not empty")
        for draft_len in one:
            check_whole(policy, "a candidate", draft_len, 0)
        if list(one) != sorted(set(one)):
            refuse("draft lengths must ascend, without repetition")


def check_tier(draft_len: int, tiers: Collection[int]) -> None:
    """Raise UnknownTier if no tier has the draft length."""
    if not is_int(draft_len) or draft_len not in tiers:
        raise UnknownTier(tier=draft_len, built=", ".join(str(tier) for tier in sorted(tiers)))


def check_built(draft_lens: Iterable[int], tiers: Collection[int]) -> None:
    """Raise UnknownTier for the first draft length that no tier has."""
    for draft_len in draft_lens:
        check_tier(draft_len, tiers)


def text_of(name: str, policy: Any) -> str:
    """Text form of a policy: its name, and the options that differ from the defaults (see :func:`read_options`)."""
    given = {item.name: getattr(policy, item.name) for item in fields(policy)}
    options = [
        f"{item.name}={_as_text(given[item.name])}" for item in fields(policy) if given[item.name] != item.default
    ]
    return name + (":" + ",".join(options) if options else "")


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ";".join(f"{rows}:{_as_text(candidates)}" for rows, candidates in value.items())
    if isinstance(value, tuple | list):
        return "/".join(str(item) for item in value) + "/" * (len(value) == 1)
    return str(value)


def read_options(policy: str, text: str, known: Collection[str]) -> dict[str, Any]:
    """Parse options such as ``alpha=0.3,candidates=0/3/7`` to keyword arguments.

    Raises:
        InvalidPolicy: the text cannot be read, or names an option that is not ``known``.
    """
    options: dict[str, Any] = {}
    for item in text.split(",") if text else []:
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in known or name in options:
            reason = f"{shown(item)} must be one of its options, once: {', '.join(f'{option}=...' for option in known)}"
            raise InvalidPolicy(policy=policy, reason=reason)
        options[name] = _read(policy, name, value.strip())
    return options


def _read(policy: str, name: str, text: str) -> Any:
    if ":" in text:
        pairs = [item.partition(":") for item in text.split(";")]
        read = _as_tuple if name == "candidates" else _number
        values = {_number(policy, rows): read(policy, rest) for rows, _, rest in pairs}
        if len(values) < len(pairs):
            raise InvalidPolicy(policy=policy, reason=f"{shown(text)} has an entry for the same number of rows twice")
        return values
    return _as_tuple(policy, text) if "/" in text else _number(policy, text)


def _as_tuple(policy: str, text: str) -> tuple[Any, ...]:
    # A "/" at the end distinguishes a list of one from a number.
    text = text.strip().removesuffix("/")
    return tuple(_number(policy, item) for item in text.split("/")) if text else ()


def _number(policy: str, text: str) -> int | float | None:
    try:
        return None if text == "None" else int(text) if text.strip().lstrip("-").isdecimal() else float(text)
    except ValueError:
        raise InvalidPolicy(policy=policy, reason=f"{shown(text)} is not a number") from None
