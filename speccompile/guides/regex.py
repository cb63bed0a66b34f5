"""Guides from regular expressions, by way of outlines-core."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide
from speccompile.guides.token_bytes import token_bytes


def regex_guide(pattern: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Texts that match ``pattern`` as a whole.

    Args:
        pattern: in the syntax of Rust's ``regex``: no look-around, no back-references.
        tokenizer: of the model, a fast one.

    Raises:
        InvalidGuide: the pattern is not valid, or no text matches it.
        InvalidInput: the tokenizer does not tell the bytes of its tokens.
    """
    core = outlines_core()
    if not isinstance(pattern, str) or not pattern:
        raise InvalidGuide(what=repr(pattern), reason="a pattern is a text that is not empty")
    by_bytes = token_bytes(tokenizer)
    # outlines-core wants an EOS token; which ones a request has is known when it comes.
    eos = len(tokenizer)
    try:
        index = core.Index(pattern, core.Vocabulary(eos, by_bytes))
    except ValueError as error:
        raise InvalidGuide(what=pattern, reason=str(error).strip()) from error
    transitions = {
        state: {token: to for token, to in moves.items() if token != eos}
        for state, moves in index.get_transitions().items()
    }
    return Guide.of_transitions(pattern, index.get_initial_state(), transitions, index.get_final_states(), eos)


def outlines_core() -> Any:
    """The library that makes automata.

    Raises:
        InvalidGuide: it is not installed.
    """
    try:
        import outlines_core
    except ImportError as error:
        reason = "it needs the library outlines-core: pip install 'speccompile[guided]'"
        raise InvalidGuide(what="guided decoding", reason=reason) from error
    return outlines_core
