"""Guides from context-free grammars."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide, error_line
from speccompile.guides.guide import Guide, compiled
from speccompile.guides.tokens import guide_tokens, llguidance


def grammar_guide(grammar: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Build a guide for texts of a context-free grammar.

    Args:
        grammar: in Lark's syntax with a rule ``start``, with llguidance's extensions, or in llama.cpp's GBNF with a
            rule ``root``. A token's name in Lark's syntax, such as ``<|tool_call|>``, is that special token.
        tokenizer: the model's tokenizer, a fast one.

    Raises:
        InvalidGuide: the grammar is not valid, or no text matches it.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    if not isinstance(grammar, str) or not grammar.strip():
        raise InvalidGuide(what=repr(grammar), reason="a grammar must be a str that is not empty")
    try:
        source = llguidance().grammar_from("grammar", grammar)
    except ValueError as error:
        raise InvalidGuide(what=grammar, reason=error_line(error)) from error
    return compiled(grammar, source, guide_tokens(tokenizer))
