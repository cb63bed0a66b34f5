"""Reads one text by a guide, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from speccompile.guides.guide import Guide

T = TypeVar("T")


class TextMatcher:
    """Position of one text in a guide's automaton.

    All texts of a guide share an automaton, which grows with what they read, up to a limit. When it is full, each text
    is read again by a separate automaton: a text fails for what others have read only if its grammar needs too long to
    be compiled again.
    """

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._automaton = guide.automaton()
        self._matcher = self._automaton.matcher.deep_copy()
        self._is_shared = True
        self._tokens: list[int] = []

    def read(self, tokens: Sequence[int]) -> int:
        """Read the first of ``tokens`` that may come next. Returns their number."""
        count: int = self._try(lambda matcher: matcher.try_consume_tokens(tokens))
        self._tokens += tokens[:count]
        return count

    def unread(self, count: int) -> None:
        """Return to the position before the last ``count`` tokens."""
        if count:
            self._matcher.rollback(count)
            del self._tokens[-count:]

    def bitmask(self) -> bytes:
        """The tokens that may come next, one bit each, the lowest bit of a byte first. Empty after the end of a text
        that cannot continue."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return b""
        mask: bytes = self._try(lambda matcher: matcher.compute_bitmask())
        return mask

    def forced(self) -> list[int]:
        """The tokens that must come next. Empty if there is a choice."""
        tokens: list[int] = self._try(lambda matcher: matcher.compute_ff_tokens())
        return tokens

    def forces_bytes(self) -> bool:
        """Whether the next bytes are known. :meth:`forced` also splits them into tokens."""
        return bool(self._try(lambda matcher: matcher.compute_ff_bytes()))

    def reads(self, token: int) -> bool:
        """Whether ``token`` may come next, in any spelling of the text."""
        return bool(self._try(lambda matcher: matcher.validate_tokens([token])))

    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._matcher.is_accepting())

    def error(self) -> str | None:
        """The reason why the text cannot be followed further."""
        return first_line(self._matcher.get_error()) if self._matcher.is_error() else None

    def _try(self, call: Callable[[Any], T]) -> T:
        result = call(self._matcher)
        if not self._is_shared:
            return result
        self._automaton.is_full |= self._matcher.is_error()
        if not self._automaton.is_full:
            return result
        self._guide.release(self._automaton)
        self._automaton, self._is_shared = self._guide.automaton(shared=False), False
        self._matcher = self._automaton.matcher
        self._matcher.try_consume_tokens(self._tokens)
        return call(self._matcher)


def first_line(message: str) -> str:
    """The part of llguidance's ``message`` before the details of its state."""
    return " ".join(message.split("<state>")[0].split())
