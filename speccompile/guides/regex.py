"""Guides from regular expressions, through outlines-core."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide
from speccompile.guides.token_bytes import token_bytes

# Follows every text. outlines-core stops at the first match, as a search does: of `a|ab` it would accept only `a`. With
# a character that must be reached after the text it follows both.
END = "\U0010ffff"
# Precedes every text. Without it outlines-core would start a match at each position that resembles the beginning, and
# would follow all of them. With it there is one beginning.
START = "\U0010fffe"


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
    return guide_of(regex_of_whole(pattern), pattern, tokenizer)


def regex_of_whole(pattern: str) -> str:
    """Return ``pattern`` without anchors, as a group that may be part of a larger pattern.

    Raises:
        InvalidGuide: ``pattern`` is not valid.
    """
    body = without_anchors(pattern)
    # ``body`` is compiled before it becomes a group: an invalid pattern may be valid within one.
    byte_index(body, pattern)
    return f"(?:{body})"


def guide_of(pattern: str, text: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Build the guide of a valid ``pattern``. Errors name ``text``, from which the pattern was derived."""
    core, by_bytes = outlines_core(), token_bytes(tokenizer)
    # get_vocab() of mistral-common leaves out tokens whose bytes are not valid UTF-8.
    size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    # outlines-core requires an EOS token. The request's EOS tokens are added later, by Guide.tables.
    end, start, eos = size, size + 1, size + 2
    marks = {mark.encode(): [*by_bytes.get(mark.encode(), []), token] for mark, token in ((END, end), (START, start))}
    try:
        index = core.Index(f"{START}(?:{pattern}){END}", core.Vocabulary(eos, by_bytes | marks))
    except ValueError as error:
        raise InvalidGuide(what=text, reason=_reason(error)) from error
    ended, moves_of = index.get_final_states(), index.get_transitions()
    initial = moves_of.pop(index.get_initial_state())[start]
    final = set()
    for state, moves in moves_of.items():
        if moves.pop(end, None) in ended:
            final.add(state)
        # START and END are not tokens of the model.
        moves.pop(start, None)
        moves.pop(eos, None)
    return Guide.of_transitions(text, initial, moves_of, final, size)


def byte_index(pattern: str, text: str) -> Any:
    """Build outlines-core's automaton over bytes.

    Raises:
        InvalidGuide: outlines-core refuses the pattern. The error names ``text``.
    """
    core = outlines_core()
    try:
        return core.Index(pattern, core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        raise InvalidGuide(what=text, reason=_reason(error)) from error


def without_anchors(pattern: str) -> str:
    """Return ``pattern`` without ``^`` at its beginning and ``$`` at its end, where a whole match implies them."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body


def _reason(error: ValueError) -> str:
    message = str(error).strip().rstrip(".")
    if "universal start state" in message:
        return "it looks around (^, $ or \\b inside of it), which a guide cannot"
    if "Failed to build DFA" in message:
        return f"it is not in the syntax of Rust's regex, or looks around or back, which a guide cannot ({message})"
    return f"no sequence of the tokenizer's tokens matches it ({message})"


def outlines_core() -> Any:
    """Import the library that builds automata.

    Raises:
        InvalidGuide: the library is not installed.
    """
    try:
        import outlines_core
    except ImportError as error:
        reason = "it needs the library outlines-core: pip install 'speccompile[guided]'"
        raise InvalidGuide(what="guided decoding", reason=reason) from error
    return outlines_core
