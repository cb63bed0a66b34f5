"""Guides from regular expressions and lists of choices."""

from __future__ import annotations

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide, compiled
from speccompile.guides.tokens import guide_tokens, llguidance


def regex_guide(pattern: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Build a guide for texts that match ``pattern`` as a whole.

    Args:
        pattern: in the syntax of Rust's ``regex``: no look-around, no back-references. ``^`` at the beginning and
            ``$`` at the end are allowed and ignored.
        tokenizer: the model's tokenizer, a fast one.

    Raises:
        InvalidGuide: the pattern is not valid, or no text matches it.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    if not isinstance(pattern, str) or not pattern:
        raise InvalidGuide(what=repr(pattern), reason="a pattern must be a str that is not empty")
    grammar = llguidance().LLMatcher.grammar_from_regex(without_anchors(pattern))
    return compiled(pattern, grammar, guide_tokens(tokenizer))


def choice_guide(choices: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Build a guide for texts that are one of ``choices``.

    Args:
        tokenizer: the model's tokenizer, a fast one.

    Raises:
        InvalidGuide: the list is empty, or a choice is not a str or is empty.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    if isinstance(choices, str) or not choices or not all(isinstance(item, str) and item for item in choices):
        raise InvalidGuide(what=repr(choices), reason="choices must be a list of str that are not empty")
    lark = "start: " + " | ".join(json.dumps(choice) for choice in choices)
    return compiled(repr(list(choices)), llguidance().LLMatcher.grammar_from_lark(lark), guide_tokens(tokenizer))


def without_anchors(pattern: str) -> str:
    """Return ``pattern`` without ``^`` at its beginning and ``$`` at its end, where a whole match implies them.

    Raises:
        InvalidGuide: ``pattern`` ends with half of an escape, which llguidance ignores.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise InvalidGuide(what=pattern, reason="it ends within an escape")
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body
