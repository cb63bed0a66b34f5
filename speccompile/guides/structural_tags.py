"""Guides of free text in which some tags begin a structure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide, compiled
from speccompile.guides.json_schema import followed_schema, schema_text
from speccompile.guides.tokens import guide_tokens, llguidance


def structural_tag_guide(
    structures: Sequence[Mapping[str, Any]], triggers: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Guide:
    """Build a guide for any text in which a trigger begins one of the structures, as vLLM's ``structural_tag`` does.

    Args:
        structures: dicts of ``begin``, ``schema`` and ``end``: JSON of the schema comes between the two texts.
        triggers: texts. Each ``begin`` must start with one of them.
        tokenizer: the model's tokenizer, a fast one.

    Raises:
        InvalidGuide: a structure has no trigger, or its schema is not valid. ``fields["what"]`` is its index.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    tokens, tags = guide_tokens(tokenizer), []
    special = {tokens.texts[token] for token in tokens.special}
    for index, structure in enumerate(structures):
        begin = structure["begin"]
        trigger = next((item for item in triggers if item and begin.startswith(item)), None)
        if trigger is None:
            raise InvalidGuide(what=index, reason=f"begin {begin!r} starts with none of the triggers {list(triggers)}")
        try:
            schema, _ = followed_schema(schema_text(structure["schema"]))
        except InvalidGuide as error:
            raise InvalidGuide(what=index, reason=error.fields["reason"]) from error
        tags.append(llguidance().StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure["end"]))
    if not tags:
        raise InvalidGuide(what="the structural tags", reason="give at least one structure")
    are_special = any(tag.trigger.encode() in special for tag in tags)
    lark = llguidance().StructTag.to_grammar(tags, assume_special=are_special)
    return compiled("the structural tags", lark, tokens)
