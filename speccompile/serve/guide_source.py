"""Source of a guide: the structure that a request requires, as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from speccompile.errors import InvalidGuide
from speccompile.guides.json_schema import followed_schema, schema_text
from speccompile.guides.regex import without_anchors
from speccompile.guides.tokens import llguidance

#: The text of a source is a JSON schema, a regular expression, a JSON list of texts, a grammar, JSON of structures and
#: triggers, or a ``ToolGrammar``.
Kind = Literal["json_schema", "regex", "choice", "grammar", "structural_tag", "tools"]
#: Any JSON object, for ``response_format`` ``json_object``.
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class GuideSource:
    """Source of a guide."""

    kind: Kind
    text: str


def lark_of(kind: str, text: str) -> str:
    """The right side of a rule in Lark's syntax for a JSON schema, a regular expression or a list of texts.

    Raises:
        InvalidGuide: the source is not valid, or of another kind.
    """
    if kind == "json_schema":
        return f"%json {followed_schema(schema_text(text))[0]}"
    if kind == "choice":
        return " | ".join(json.dumps(choice) for choice in json.loads(text))
    if kind == "regex":
        pattern = without_anchors(text)
        matcher = llguidance().LLMatcher
        failed, messages = matcher.validate_grammar_with_warnings(matcher.grammar_from_regex(pattern))
        if failed:
            # Here, since an invalid pattern may be valid within a grammar.
            raise InvalidGuide(what=text, reason=" ".join(messages[0].split()))
        return f"/{llguidance().regex_to_lark(pattern, '')}/"
    raise InvalidGuide(what=text, reason="tools cannot be combined with a grammar")
