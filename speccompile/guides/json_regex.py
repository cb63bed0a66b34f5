"""Regular expressions of JSON text: strings, formats, lists, members, constants.

They are in the syntax of Rust's regex, which the automaton's builder reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from speccompile.guides.regex import END, byte_index

# 29 February is not matched.
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[12][0-9]{{3}}-{_DAY}"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR})"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}"
_PATH = "[A-Za-z0-9._~!$&'()*+,;=:@-]*"
#: Expressions of formats by name: subsets of RFC 3339, 4122, 3986 and 5321.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": rf"https?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_PATH})*(?:\?{_PATH})?(?:#{_PATH})?",
    "email": rf"[A-Za-z0-9_%+-]+(?:\.[A-Za-z0-9_%+-]+)*@{_HOST}",
}
# One character of a string, except the two marks that enclose each text.
CHARACTER = r'(?:[^"\\\x00-\x1F\x7F-\x9F\x{10FFFE}\x{10FFFF}]|\\["\\/bfnrt])'
SPACE = " ?"
COMMA = f"{SPACE},{SPACE}"


def any_of(parts: Sequence[str]) -> str:
    """Expression that matches one of ``parts``."""
    return f"(?:{'|'.join(parts)})"


def times(low: int, high: int | None) -> str:
    """Suffix that repeats an expression ``low`` to ``high`` times; None means without limit."""
    return f"{{{low},{'' if high is None else high}}}"


def separated(item: str, low: int, high: int | None) -> str:
    """Expression for ``low`` to ``high`` of ``item``, separated by commas."""
    if high == 0:
        return ""
    more = times(max(low - 1, 0), None if high is None else high - 1)
    return f"(?:{item}(?:{COMMA}{item}){more}){'' if low else '?'}"


def members(pairs: Sequence[tuple[str, bool]]) -> str:
    """Expression for pairs (expression, required) in their order, separated by commas. Optional ones may be missing."""
    after_another, first = "", ""
    for pair, required in reversed(pairs):
        first = f"{pair}{after_another}" if required else f"(?:{pair}{after_another}|{first})"
        after_another = f"{COMMA}{pair}{after_another}" if required else f"(?:{COMMA}{pair})?{after_another}"
    return f"(?:{first})"


def constant(value: Any) -> str:
    """Expression for exactly one JSON value."""
    if isinstance(value, Mapping):
        pairs = [f"{constant(str(name))}{SPACE}:{SPACE}{constant(item)}" for name, item in value.items()]
        return rf"\{{{SPACE}{COMMA.join(pairs)}{SPACE}\}}"
    if isinstance(value, list | tuple):
        return rf"\[{SPACE}{COMMA.join(map(constant, value))}{SPACE}\]"
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def literal(text: str) -> str:
    """Expression for exactly ``text``."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)


# JSON schemas have ECMA-262 patterns: these classes are ASCII there, and && in a class is two ampersands.
_ECMA_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    "&&": r"\&\&",
    "~~": r"\~\~",
}


def ecma_pattern(pattern: str) -> str:
    """An ECMA-262 ``pattern`` in the syntax of the automaton's builder."""
    return re.sub(r"\\.|&&|~~", lambda found: _ECMA_CLASSES.get(found[0], found[0]), pattern, flags=re.DOTALL)


def matches_escaped(pattern: str, text: str) -> bool:
    """Return whether ``pattern`` matches a character that JSON must escape. Errors name ``text``."""
    escaped = {*range(0x20), ord('"'), ord("\\")}
    return any(escaped & moves.keys() for moves in byte_index(f"(?:{pattern}){END}", text).get_transitions().values())
