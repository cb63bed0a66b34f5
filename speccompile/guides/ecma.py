"""Patterns of JSON schemas, which are ECMA-262's, in the syntax of Rust's ``regex``, which llguidance reads."""

from __future__ import annotations

import re

from speccompile.errors import InvalidGuide

#: One atom of a pattern: an escape, or one character.
_ATOM = re.compile(r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)|.", re.DOTALL)
#: Escapes of more than one character, or with another meaning in Rust's syntax.
_UNKNOWN = re.compile(r"\\(?:[pPxu0-9]|[ACE-OQ-RT-VX-Za-aceg-moqyz])")
_CLASS_ESCAPE = re.compile(r"\\[dDwWsSpP]")
#: Characters with a meaning inside of a class of Rust's syntax.
_IN_CLASS = frozenset("[]^&~-")
_GROUP = re.compile(r"\(\?(?!:|=|!|<[=!]|<[A-Za-z_$])")
#: ECMA-262's white space. Rust's has U+0085 and lacks U+FEFF.
_SPACE = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_OUTSIDE_CLASS = {".": r"[^\n\r\u{2028}\u{2029}]", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}
_INSIDE_CLASS = {r"\s": _SPACE, r"\S": f"[^{_SPACE}]"}


def rust_pattern(pattern: str) -> str:
    """Translate a ``pattern``: ``[`` inside of a class is a character, ``&&``, ``~~`` and ``--`` are characters too, an
    empty class matches nothing, and ``.`` matches no line end.

    Raises:
        InvalidGuide: ``pattern`` has inline flags or an escape that ECMA-262 does not have, or reads otherwise.
    """
    atoms = _ATOM.findall(pattern)
    for atom in atoms:
        if len(atom) == 2 and _UNKNOWN.fullmatch(atom):
            raise InvalidGuide(what=pattern, reason=f"the escape {atom!r} cannot be followed")
    translated, index = [], 0
    while index < len(atoms):
        if atoms[index] == "[":
            end = _end_of_class(pattern, atoms, index)
            translated.append(_class(atoms[index + 1 : end]))
            index = end
        elif atoms[index] == "(" and _GROUP.match("".join(atoms[index : index + 4])):
            raise InvalidGuide(what=pattern, reason="'(?' begins no group of ECMA-262")
        else:
            translated.append(_OUTSIDE_CLASS.get(atoms[index], atoms[index]))
        index += 1
    return "".join(translated)


def _end_of_class(pattern: str, atoms: list[str], start: int) -> int:
    try:
        return atoms.index("]", start + 1)
    except ValueError:
        raise InvalidGuide(what=pattern, reason="a class of its pattern has no end") from None


def _class(atoms: list[str]) -> str:
    """A class in Rust's syntax. ``atoms`` are those between its brackets."""
    negated = atoms[:1] == ["^"]
    atoms = atoms[negated:]
    if not atoms:
        return r"[\s\S]" if negated else r"[^\s\S]"
    parts, index = [], 0
    while index < len(atoms):
        first, *rest = atoms[index : index + 3]
        ends = len(rest) == 2 and rest[0] == "-" and not any(map(_CLASS_ESCAPE.match, (first, rest[1])))
        parts.append(f"{_literal(first)}-{_literal(rest[1])}" if ends else _literal(first))
        index += 3 if ends else 1
    return f"[{'^' * negated}{''.join(parts)}]"


def _literal(atom: str) -> str:
    return f"\\{atom}" if atom in _IN_CLASS else _INSIDE_CLASS.get(atom, atom)
