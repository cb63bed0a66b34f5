"""How calls of tools are written in a model's text, and the regular expression of texts that may have them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from speccompile.errors import InvalidGuide
from speccompile.guides.json_regex import any_of, constant
from speccompile.guides.json_schema import json_schema_regex

#: Any character, but for the marks that guides put around a text.
_ANY = r"[^\x{10FFFE}\x{10FFFF}]"


@dataclass(frozen=True)
class CallSyntax:
    """A call is the JSON of ``{"name": ..., arguments: {...}}`` between two marks.

    Args:
        opening, closing: the marks; empty where a call is the whole text.
        arguments: the name of the arguments.
    """

    opening: str
    closing: str
    arguments: str


def syntax_of(template: str) -> CallSyntax:
    """What a chat template tells its model: Hermes' and Qwen's tags, Llama 3's ``parameters``, or plain JSON."""
    if "<tool_call>" in template:
        return CallSyntax("<tool_call>", "</tool_call>", "arguments")
    return CallSyntax("", "", "parameters" if '"parameters": dictionary' in template else "arguments")


@dataclass(frozen=True)
class ToolGrammar:
    """The texts that a choice of tools allows.

    Args:
        tools: names, with the JSON schema of the arguments; None is a function without parameters.
        required: a call has to come; else there may be text before calls, and text alone.
        parallel: more than one call may come. Without marks there is one at most.
    """

    tools: tuple[tuple[str, Mapping[str, Any] | None], ...]
    syntax: CallSyntax
    required: bool
    parallel: bool

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> ToolGrammar:
        given = json.loads(text)
        tools = tuple((name, schema) for name, schema in given["tools"])
        return ToolGrammar(tools, CallSyntax(**given["syntax"]), given["required"], given["parallel"])

    def regex(self) -> str:
        """
        Raises:
            InvalidGuide: a schema cannot be followed; ``fields["what"]`` is the tool's number.
        """
        syntax = self.syntax
        body = any_of([self._call(index, *tool) for index, tool in enumerate(self.tools)])
        call = rf"{re.escape(syntax.opening)}\n?{body}\n?{re.escape(syntax.closing)}" if syntax.opening else body
        calls = rf"{call}(?:\n?{call})*" if self.parallel and syntax.opening else call
        if self.required:
            return calls
        if syntax.opening:
            return rf"{_without(syntax.opening)}(?:{calls})?"
        return any_of([calls, rf"(?:[^{{\x{{10FFFE}}\x{{10FFFF}}]{_ANY}*)?"])

    def _call(self, index: int, name: str, schema: Mapping[str, Any] | None) -> str:
        try:
            arguments = r"\{\}" if schema is None else json_schema_regex(schema)
        except InvalidGuide as error:
            raise InvalidGuide(what=index, reason=error.fields["reason"]) from error
        return rf'\{{"name": ?{constant(name)}, ?"{self.syntax.arguments}": ?{arguments}\}}'


def _without(mark: str) -> str:
    """Texts in which ``mark`` does not occur. Its first character comes in it once, so that after a character that
    does not continue it nothing of it has begun."""
    first, rest = mark[0], mark[1:]
    assert first not in rest
    other = rf"[^{re.escape(first)}\x{{10FFFE}}\x{{10FFFF}}]"
    # What may stand between two first characters: no beginning that is all of the rest.
    between = ""
    for char in reversed(rest):
        differs = rf"[^{re.escape(first)}{re.escape(char)}\x{{10FFFE}}\x{{10FFFF}}]{other}*"
        between = rf"(?:{differs}|{re.escape(char)}{between})?" if between else rf"(?:{differs})?"
    return rf"{other}*(?:{re.escape(first)}{between})*"


@dataclass(frozen=True)
class Call:
    """A call that the model wrote; ``arguments`` are the JSON text of an object."""

    name: str
    arguments: str


class CallReader:
    """Takes calls out of a text that arrives in pieces."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._syntax = syntax
        self._text = ""
        self._state: Literal["text", "call"] = "text"
        self._is_start = True

    def add(self, piece: str) -> list[str | Call]:
        """What can be told by now: pieces of text, and whole calls."""
        self._text += piece
        found: list[str | Call] = []
        while True:
            item = self._next()
            if item is None:
                return [part for part in found if part != ""]
            found.append(item)

    def end(self) -> list[str | Call]:
        """What is left: text in which a mark had begun, or a call that the end of the text cut."""
        rest, self._text = self._text, ""
        if self._state == "call" and rest and (call := self._parsed(rest)) is not None:
            return [call]
        if not rest.strip() and self._state == "text" and not self._is_start:
            return []
        return [self._syntax.opening * (self._state == "call") + rest] if rest else []

    def _next(self) -> str | Call | None:
        opening, closing = self._syntax.opening, self._syntax.closing
        if not opening:
            return self._next_without_marks()
        if self._state == "call":
            body, mark, after = self._text.partition(closing)
            if not mark:
                return None
            self._text, self._state, self._is_start = after.lstrip("\n"), "text", False
            return self._parsed(body) or f"{opening}{body}{closing}"
        before, mark, after = self._text.partition(opening)
        if mark:
            self._text, self._state = after, "call"
            return before.rstrip("\n")
        keep = next((size for size in range(len(opening) - 1, 0, -1) if self._text.endswith(opening[:size])), 0)
        # A line break before a call is not part of the text.
        shown = self._text[: len(self._text) - keep]
        shown = shown.rstrip("\n")
        self._text = self._text[len(shown) :]
        return shown or None

    def _next_without_marks(self) -> str | Call | None:
        if self._is_start and self._text.startswith("{"):
            self._state = "call"
        if self._state == "call" or not self._text:
            return None
        shown, self._text, self._is_start = self._text, "", False
        return shown

    def _parsed(self, body: str) -> Call | None:
        try:
            value = json.loads(body)
            return Call(value["name"], json.dumps(value[self._syntax.arguments], ensure_ascii=False))
        except (ValueError, KeyError, TypeError):
            # Cut by the end of the text.
            return None
