"""A guide: a grammar that the text of a request follows, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from speccompile.errors import InvalidGuide
from speccompile.guides.matcher import TextMatcher, first_line
from speccompile.guides.tokens import GuideTokens, llguidance

#: Work to compile the expressions of a grammar in the middle of a step, in llguidance's units: 0.04 s.
_LITTLE_FUEL = 100_000


@dataclass
class Automaton:
    """A grammar's automaton. It grows while texts follow it.

    Args:
        matcher: an ``LLMatcher`` at the beginning of a text. Its copies share the automaton.
        is_full: it has reached its limit. From then on its matchers return wrong results, without an error.
    """

    matcher: Any
    is_full: bool = False


@dataclass(frozen=True, eq=False)
class Guide:
    """A grammar over the tokens of one tokenizer. Several requests may have the same guide.

    Args:
        text: pattern, schema or grammar that the guide was built from, for messages.
        grammar: the grammar as llguidance reads it.
        tokens: the tokens of the tokenizer.
        loosened: parts of a schema that the guide does not enforce.
    """

    text: str
    grammar: str = field(repr=False)
    tokens: GuideTokens = field(repr=False)
    loosened: tuple[str, ...] = ()

    @cached_property
    def _automaton(self) -> Automaton:
        return Automaton(self._compile())

    @property
    def is_compiled(self) -> bool:
        """Whether a text can begin without compilation."""
        return "_automaton" in self.__dict__

    def automaton(self, *, shared: bool = True) -> Automaton:
        """The automaton that texts share, or a new one. The matcher of a new one is in error if its compilation
        needs long."""
        if shared:
            return self._automaton
        return Automaton(self._compile(limits=llguidance().LLParserLimits(initial_lexer_fuel=_LITTLE_FUEL)))

    def release(self, automaton: Automaton | None = None) -> None:
        """Free ``automaton``, or the shared one, when no text follows it any more. Later texts share a new one."""
        if automaton is None or self.__dict__.get("_automaton") is automaton:
            self.__dict__.pop("_automaton", None)

    def _compile(self, **options: Any) -> Any:
        return llguidance().LLMatcher(self.tokens.for_llguidance, self.grammar, log_level=0, **options)

    def matcher(self) -> Any:
        """A new ``LLMatcher`` at the beginning of a text."""
        return self._automaton.matcher.deep_copy()

    def matches(self, ids: list[int], *, whole: bool = True) -> bool:
        """Return whether ``ids`` are allowed from the beginning and, with ``whole``, are a complete text."""
        if not all(0 <= token < self.tokens.vocab_size for token in ids):
            return False
        matcher = TextMatcher(self)
        return matcher.read(ids) == len(ids) and (not whole or matcher.is_complete())


def compiled(text: str, grammar: str, tokens: GuideTokens, loosened: tuple[str, ...] = ()) -> Guide:
    """Build a guide whose grammar llguidance accepts.

    Args:
        text: names the guide in errors.

    Raises:
        InvalidGuide: the grammar is not valid, exceeds llguidance's limits, or no text matches it.
    """
    guide = Guide(text, grammar, tokens, loosened)
    matcher = guide.matcher()
    if matcher.is_error():
        raise InvalidGuide(what=text, reason=first_line(matcher.get_error()))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    if matcher.stop_reason() in ("LexerTooComplex", "ParserTooComplex"):
        raise InvalidGuide(what=text, reason=first_line(matcher.get_error()))
    if matcher.is_error() or not (bits[: tokens.vocab_size].any() or matcher.is_accepting()):
        raise InvalidGuide(what=text, reason="no sequence of the tokenizer's tokens matches it")
    return guide
