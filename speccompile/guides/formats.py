"""Keywords that llguidance follows in place of a ``format``."""

from __future__ import annotations

from typing import Any

#: Formats of JSON Schema 2020-12 (validation, section 7.3). llguidance refuses those of them that it does not follow.
_DEFINED = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "regex"),
    }
)
#: RFC 6901, and the draft of relative JSON pointers.
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_PATTERNS = {"json-pointer": _POINTER, "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})"}


def keywords_of_format(name: str) -> dict[str, Any]:
    """The keywords to write instead of a ``format``: none for a name that JSON Schema does not define."""
    if name in _PATTERNS:
        return {"pattern": f"^(?:{_PATTERNS[name]})$"}
    return {"format": name} if name in _DEFINED else {}
