"""Patterns that look ahead at their beginning, as patterns that all match: ``^(?!a)(?=.*b)c`` is three of them.

Rust's ``regex`` has no look-ahead. What must not follow can only be a text, after any others (``.*``) or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from speccompile.errors import InvalidGuide

#: The text that must not follow: whether others come before it, its characters, and whether it must be the end.
_TEXT = re.compile(r"(?P<any>\.\*)?(?P<text>(?:[^\\^$.*+?()\[\]{}|]|\\[^\w\s])+)(?P<end>\$)?")
_ANY = r"[\s\S]*"
_AHEAD = ("^(?!", "^(?=")
_SPECIAL = frozenset("\\^$.*+?()[]{}|/-")
#: Bound of a text that must not follow after others. The pattern without it multiplies with each character.
MOST_CHARACTERS = 6


def without_lookaheads(pattern: str) -> list[str]:
    """Patterns without look-ahead that match together what ``pattern`` matches. The last one is the rest of it.

    Raises:
        InvalidGuide: it looks ahead at another place, or for more than a text that must not follow.
    """
    found: list[str] = []
    if pattern.startswith(_AHEAD) and _has_alternatives(pattern):
        reason = f"look-ahead in one of several alternatives of {pattern!r} cannot be followed"
        raise InvalidGuide(what=pattern, reason=reason)
    while pattern.startswith(_AHEAD):
        end = _end_of_group(pattern, 1)
        body = pattern[4:end]
        found.append(f"^(?:{body})" if pattern[3] == "=" else _refusing(body))
        pattern = f"^{pattern[end + 1 :]}"
    return [*found, pattern]


def _depths(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Index, character and depth of parentheses after it, of all characters that have a meaning outside of classes."""
    depth, index, in_class = 0, 0, False
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            yield index, character, depth
        index += 1


def _has_alternatives(pattern: str) -> bool:
    return any(character == "|" and not depth for _, character, depth in _depths(pattern))


def _end_of_group(pattern: str, start: int) -> int:
    """The index of the parenthesis that closes the one at ``start``, before which none is open."""
    for index, _, depth in _depths(pattern):
        if index > start and not depth:
            return index
    raise InvalidGuide(what=pattern, reason=f"pattern {pattern!r}: a parenthesis is not closed")


def _refusing(body: str) -> str:
    """A pattern of the texts at whose beginning ``body`` does not match. ``.*`` in it also passes line ends."""
    parts = _TEXT.fullmatch(body)
    text = "" if parts is None else re.sub(r"\\(.)", r"\1", parts["text"])
    if parts is None or (parts["any"] and len(text) > MOST_CHARACTERS):
        reason = f"look-ahead for {body!r}, which is not a text, or a long one after others, cannot be followed"
        raise InvalidGuide(what=body, reason=reason)
    if parts["any"]:
        return f"^(?:{_without(text, at_end=bool(parts['end']))})$"
    options = [f"{_literal(text[:index])}(?:[^{_literal(text[index])}]{_ANY})?" for index in range(len(text))]
    return f"^(?:{'|'.join([*options, *[_literal(text) + _ANY[:-1] + '+'] * bool(parts['end'])])})$"


def _without(text: str, *, at_end: bool) -> str:
    """A pattern of what does not contain ``text``, or does not end with it: the automaton that searches for it, whose
    states are removed one by one. State i has read the first i characters."""
    last = len(text)
    steps: dict[tuple[int, int], str] = {}
    for state in range(last + at_end):
        others = "".join(map(_literal, dict.fromkeys(text)))
        steps[state, 0] = f"[^{others}]"
        for character in dict.fromkeys(text):
            read = text[:state] + character
            following = next(size for size in range(min(last, len(read)), -1, -1) if read.endswith(text[:size]))
            if following < last or at_end:
                known = steps.get((state, following))
                steps[state, following] = f"{known}|{_literal(character)}" if known else _literal(character)
    # What may come after a state until the end.
    rest = {state: "" for state in range(last)}
    for state in range(last - (not at_end), 0, -1):
        again = f"(?:{steps[state, state]})*" if (state, state) in steps else ""
        for before in range(state):
            if (before, state) not in steps:
                continue
            through = f"(?:{steps[before, state]}){again}"
            if state in rest:
                rest[before] = f"{rest[before]}|{through}(?:{rest[state]})"
            for after in range(state):
                if (state, after) in steps:
                    known, way = steps.get((before, after)), f"{through}(?:{steps[state, after]})"
                    steps[before, after] = f"{known}|{way}" if known else way
    return f"(?:{steps[0, 0]})*(?:{rest[0]})"


def _literal(text: str) -> str:
    return "".join(f"\\{character}" if character in _SPECIAL else character for character in text)
