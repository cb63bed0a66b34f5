"""Reads calls of tools out of a text while it arrives."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Literal

from speccompile.serve.tool_grammar import CallSyntax


@dataclass(frozen=True)
class CallBegin:
    """A call of the function ``name``, whose arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the JSON text of the arguments of the newest call. ``last``: they are complete."""

    text: str
    last: bool


Item = str | CallBegin | Arguments


@dataclass
class CallReader:
    """Reads a text that follows a :class:`~speccompile.serve.tool_grammar.ToolGrammar`."""

    syntax: CallSyntax
    _text: str = field(default="", init=False)
    #: Where the next character is: in text, in a call before its arguments, in these, or after them.
    _state: Literal["text", "head", "arguments", "tail"] = field(default="text", init=False)
    _is_start: bool = field(default=True, init=False)
    _depth: int = field(default=0, init=False)
    _string: Literal["", "inside", "escape"] = field(default="", init=False)

    def __post_init__(self) -> None:
        self._head = re.compile(rf'\n?\{{"name": ?("[^"]*"), ?"{self.syntax.arguments}": ?(?=\{{)')

    def add(self, piece: str) -> list[Item]:
        """What is known after ``piece``: texts, beginnings of calls, and pieces of arguments."""
        self._text += piece
        found: list[Item] = []
        while (item := self._next()) is not None:
            found.append(item)
        return [item for item in found if item != ""]

    def end(self) -> list[Item]:
        """What was kept back: text in which a mark or a call had begun. Arguments that the end of the text cut stay
        unfinished."""
        rest, self._text = self._text, ""
        if self._state == "head":
            return [self.syntax.opening + rest]
        if self._state == "tail" or (not rest.strip() and not self._is_start):
            return []
        return [rest] if rest else []

    def _next(self) -> Item | None:
        """The next item; an empty text where only the state has changed, None where more text is needed."""
        if not self._text:
            return None
        if self._state == "text":
            return self._next_text()
        if self._state == "head":
            return self._next_head()
        if self._state == "arguments":
            return self._next_arguments()
        if not self.syntax.closing:
            return None
        _, mark, after = self._text.partition(self.syntax.closing)
        if not mark:
            return None
        self._text, self._state, self._is_start = after.lstrip("\n"), "text", False
        return ""

    def _next_text(self) -> str | None:
        opening = self.syntax.opening
        if not opening:
            if self._is_start and self._text.startswith("{"):
                self._state = "head"
                return ""
            shown, self._text, self._is_start = self._text, "", False
            return shown
        before, mark, after = self._text.partition(opening)
        if mark:
            self._text, self._state = after, "head"
            return before.rstrip("\n")
        keep = next((size for size in range(len(opening) - 1, 0, -1) if self._text.endswith(opening[:size])), 0)
        # A line break before a call is not part of the text.
        shown = self._text[: len(self._text) - keep].rstrip("\n")
        self._text = self._text[len(shown) :]
        return shown or None

    def _next_head(self) -> CallBegin | None:
        found = self._head.match(self._text)
        if found is None:
            return None
        self._text, self._state, self._depth = self._text[found.end() :], "arguments", 0
        return CallBegin(json.loads(found[1]))

    def _next_arguments(self) -> Arguments:
        for place, char in enumerate(self._text):
            self._count(char)
            if not self._depth:
                piece, self._text, self._state = self._text[: place + 1], self._text[place + 1 :], "tail"
                return Arguments(piece, last=True)
        piece, self._text = self._text, ""
        return Arguments(piece, last=False)

    def _count(self, char: str) -> None:
        """Follow the nesting of JSON over one more character."""
        if self._string == "escape":
            self._string = "inside"
        elif self._string == "inside" and char == "\\":
            self._string = "escape"
        elif char == '"':
            self._string = "" if self._string else "inside"
        elif not self._string:
            self._depth += (char in "{[") - (char in "}]")
