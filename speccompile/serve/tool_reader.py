"""Parses tool calls in a text while it arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal

from speccompile.serve.tool_grammar import ToolGrammar


@dataclass(frozen=True)
class CallBegin:
    """Beginning of a call of the function ``name``. Its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """Next piece of the JSON text of the newest call's arguments. ``last``: they are complete."""

    text: str
    last: bool


Item = str | CallBegin | Arguments


@dataclass
class CallReader:
    """Parser of a text that follows ``grammar``."""

    grammar: ToolGrammar
    _text: str = field(default="", init=False)
    #: Kind of the next characters: text or the mark of a call ("open"), text, a call before its arguments, arguments,
    #: or the rest of a call.
    _state: Literal["open", "text", "head", "arguments", "tail"] = field(default="open", init=False)
    _has_text: bool = field(default=False, init=False)
    _has_call: bool = field(default=False, init=False)
    _depth: int = field(default=0, init=False)
    _string: Literal["", "inside", "escape"] = field(default="", init=False)

    def __post_init__(self) -> None:
        arguments = self.grammar.syntax.arguments
        self._head = re.compile(rf'\n?\{{"name": ("[^"]*"), "{arguments}": (?=\{{)')
        # Beginnings of calls, for a syntax without marks.
        self._heads = [f'{{"name": "{tool.name}", "{arguments}": {{' for tool in self.grammar.tools]

    def add(self, piece: str) -> list[Item]:
        """Return the items that ``piece`` completes: texts, beginnings of calls, and pieces of arguments."""
        self._text += piece
        found: list[Item] = []
        while (item := self._next()) is not None:
            found.append(item)
        return [item for item in found if item != ""]

    def end(self, *, cut: bool) -> list[Item]:
        """Return text that was held back. A call that ended before its arguments is dropped.

        Args:
            cut: whether a limit has ended the text. The beginning of a mark then belongs to a call, unless it is a
                single character after text.
        """
        rest, self._text = self._text, ""
        if self._state != "open" or self._has_call or not self._may_follow_text:
            return []
        mark = rest.lstrip("\n")
        is_call = cut and bool(mark) and not (self._has_text and len(mark) == 1)
        return [rest] if rest and not is_call else []

    @property
    def _may_follow_text(self) -> bool:
        """Whether a call may follow text."""
        grammar = self.grammar
        return bool(grammar.syntax.opening) and not grammar.required and grammar.answer is None

    def _next(self) -> Item | None:
        """Next item; an empty text if only the state has changed; None if more text is needed."""
        if not self._text:
            return None
        if self._state == "open":
            return self._next_text() if self._may_follow_text or self._has_call else self._first()
        if self._state == "text":
            shown, self._text = self._text, ""
            return shown
        if self._state == "head":
            return self._next_head()
        if self._state == "arguments":
            return self._next_arguments()
        if not self.grammar.syntax.closing:
            return None
        _, mark, after = self._text.partition(self.grammar.syntax.closing)
        if not mark:
            return None
        self._text, self._state, self._has_call = after.lstrip("\n"), "open", True
        return ""

    def _first(self) -> str | None:
        """State after the beginning of a text that consists either of calls or of text."""
        opening = self.grammar.syntax.opening
        begins = [opening] if opening else self._heads
        if any(self._text.startswith(begin) for begin in begins):
            self._text, self._state = self._text.removeprefix(opening), "head"
        elif any(begin.startswith(self._text) for begin in begins):
            return None
        else:
            self._state = "text"
        return ""

    def _next_text(self) -> str | None:
        opening = self.grammar.syntax.opening
        before, mark, after = self._text.partition(opening)
        if mark:
            self._text, self._state = after, "head"
            return before.rstrip("\n")
        keep = next((size for size in range(len(opening) - 1, 0, -1) if self._text.endswith(opening[:size])), 0)
        # A line break before a call is not part of the text.
        shown = self._text[: len(self._text) - keep].rstrip("\n")
        self._text = self._text[len(shown) :]
        self._has_text |= bool(shown)
        return shown or None

    def _next_head(self) -> CallBegin | None:
        found = self._head.match(self._text)
        if found is None:
            return None
        self._text, self._state, self._depth = self._text[found.end() :], "arguments", 0
        return CallBegin(json.loads(found[1]))

    def _next_arguments(self) -> Arguments:
        for index, char in enumerate(self._text):
            self._count(char)
            if not self._depth:
                piece, self._text, self._state = self._text[: index + 1], self._text[index + 1 :], "tail"
                return Arguments(piece, last=True)
        piece, self._text = self._text, ""
        return Arguments(piece, last=False)

    def _count(self, char: str) -> None:
        """Update the nesting depth of JSON by one character."""
        if self._string == "escape":
            self._string = "inside"
        elif self._string == "inside" and char == "\\":
            self._string = "escape"
        elif char == '"':
            self._string = "" if self._string else "inside"
        elif not self._string:
            self._depth += (char in "{[") - (char in "}]")
