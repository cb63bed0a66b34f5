"""Guides from regular expressions, by way of outlines-core."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.guide import Guide
from speccompile.guides.token_bytes import token_bytes

# Comes after every text. outlines-core looks for the first match, as a search does, so that of `a|ab` it would know
# `a` alone; with an end to reach it has to follow both.
END = "\U0010ffff"
# Comes before every text. outlines-core would follow matches from each place that looks like the beginning: as
# many sets of them as a long text with quotes in it may have beginnings. After a mark there is one.
START = "\U0010fffe"


def regex_guide(pattern: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """Texts that match ``pattern`` as a whole.

    Args:
        pattern: in the syntax of Rust's ``regex``: no look-around, no back-references. ``^`` at the beginning and
            ``$`` at the end are allowed, and mean nothing here.
        tokenizer: of the model, a fast one.

    Raises:
        InvalidGuide: the pattern is not valid, or no text matches it.
        InvalidInput: the bytes of the tokenizer's tokens are unknown.
    """
    if not isinstance(pattern, str) or not pattern:
        raise InvalidGuide(what=repr(pattern), reason="a pattern is a text that is not empty")
    return guide_of(regex_of_whole(pattern), pattern, tokenizer)


def regex_of_whole(pattern: str) -> str:
    """``pattern`` without anchors, as a group that may be part of a larger pattern.

    Raises:
        InvalidGuide: it is not valid.
    """
    body = without_anchors(pattern)
    # Inside of a group, what is not a pattern by itself may look like one.
    byte_index(body, pattern)
    return f"(?:{body})"


def guide_of(pattern: str, text: str, tokenizer: PreTrainedTokenizerBase) -> Guide:
    """The guide of a valid ``pattern``, which was made of ``text``."""
    core, by_bytes = outlines_core(), token_bytes(tokenizer)
    # get_vocab() of mistral-common leaves out tokens whose bytes are not valid UTF-8.
    size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
    # It also wants an EOS token; which ones a request has is known when it comes.
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
        # Neither is a token of the model's.
        moves.pop(start, None)
        moves.pop(eos, None)
    return Guide.of_transitions(text, initial, moves_of, final, size)


def byte_index(pattern: str, text: str) -> Any:
    """outlines-core's automaton over bytes.

    Raises:
        InvalidGuide: it cannot make one; ``text`` is what the error calls the pattern.
    """
    core = outlines_core()
    try:
        return core.Index(pattern, core.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)}))
    except ValueError as error:
        raise InvalidGuide(what=text, reason=_reason(error)) from error


def without_anchors(pattern: str) -> str:
    """A text that matches as a whole begins and ends where it does."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    escaped = (len(body) - len(body.rstrip("\\"))) % 2
    return pattern if escaped else body


def _reason(error: ValueError) -> str:
    message = str(error).strip().rstrip(".")
    if "universal start state" in message:
        return "it looks around (^, $ or \\b inside of it), and a guide cannot"
    if "Failed to build DFA" in message:
        return f"it is not in the syntax of Rust's regex, or looks around or back, and a guide cannot ({message})"
    return f"no sequence of the tokenizer's tokens matches it ({message})"


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
