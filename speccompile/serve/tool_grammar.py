"""Syntax of tool calls in a model's text, and the regular expression of texts that may have calls.
:mod:`~speccompile.serve.tool_reader` parses them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speccompile.errors import InvalidGuide
from speccompile.guides.json_regex import any_of, constant
from speccompile.guides.json_schema import json_schema_regex
from speccompile.guides.regex import regex_of_whole

#: Index of :attr:`ToolGrammar.answer` in errors. Tools have their own indices.
ANSWER = -1
#: Any character except the marks that guides add around a text.
_ANY = r"[^\x{10FFFE}\x{10FFFF}]"


@dataclass(frozen=True)
class CallSyntax:
    """Syntax of a call: the JSON of ``{"name": ..., arguments: {...}}`` between two marks.

    Args:
        opening, closing: the marks; empty if a call is the whole text.
        arguments: key of the arguments.
    """

    opening: str
    closing: str
    arguments: str

    def text_of(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Format a call as models write it."""
        call = json.dumps({"name": name, self.arguments: arguments}, ensure_ascii=False)
        return f"{self.opening}\n{call}\n{self.closing}" if self.opening else call


#: Tags of Hermes and Qwen, also used if a chat template does not write tools.
DEFAULT_SYNTAX = CallSyntax("<tool_call>", "</tool_call>", "arguments")


def syntax_of(template: str) -> CallSyntax:
    """Syntax that a chat template describes: Hermes' and Qwen's tags, Llama 3's ``parameters``, or plain JSON."""
    if "<tool_call>" in template:
        return DEFAULT_SYNTAX
    return CallSyntax("", "", "parameters" if '"parameters": dictionary' in template else "arguments")


@dataclass(frozen=True)
class ToolGrammar:
    """Grammar of the texts that a choice of tools allows.

    Args:
        tools: names with the JSON schema of the arguments; None is a function without parameters.
        required: whether there must be a call. Otherwise text may precede calls, or replace them.
        parallel: whether there may be several calls. Without marks there is at most one.
        answer: structure of a text without calls: the kind of its source, ``json_schema`` or ``regex``, and the source.
            With it, text before calls is not allowed.
    """

    tools: tuple[tuple[str, Mapping[str, Any] | None], ...]
    syntax: CallSyntax
    required: bool
    parallel: bool
    answer: tuple[str, str] | None = None

    def as_text(self) -> str:
        """Serialise the grammar to JSON, for the process that compiles guides."""
        return json.dumps(asdict(self))

    @staticmethod
    def of_text(text: str) -> ToolGrammar:
        """Parse the result of :meth:`as_text`."""
        given = json.loads(text)
        tools = tuple((name, schema) for name, schema in given["tools"])
        answer = None if given["answer"] is None else tuple(given["answer"])
        return ToolGrammar(tools, CallSyntax(**given["syntax"]), given["required"], given["parallel"], answer)

    def regex(self) -> str:
        """Regular expression of the allowed texts.

        Raises:
            InvalidGuide: a schema is not supported. ``fields["what"]`` is the tool's index, or :data:`ANSWER`.
        """
        syntax = self.syntax
        body = any_of([self._call(index, *tool) for index, tool in enumerate(self.tools)])
        call = rf"{re.escape(syntax.opening)}\n?{body}\n?{re.escape(syntax.closing)}" if syntax.opening else body
        # In this form the automaton has one copy of the call. "call(\n?call)*" would have two.
        calls = rf"(?:{call}\n?)*{call}" if self.parallel and syntax.opening else call
        if self.required:
            return calls
        if self.answer is not None:
            return any_of([calls, self._answer(*self.answer)])
        if syntax.opening:
            return rf"{_without(syntax.opening)}(?:{calls})?"
        return any_of([calls, rf"(?:[^{{\x{{10FFFE}}\x{{10FFFF}}]{_ANY}*)?"])

    def _answer(self, kind: str, source: str) -> str:
        try:
            return json_schema_regex(source) if kind == "json_schema" else regex_of_whole(source)
        except InvalidGuide as error:
            raise InvalidGuide(what=ANSWER, reason=error.fields["reason"]) from error

    def _call(self, index: int, name: str, schema: Mapping[str, Any] | None) -> str:
        try:
            arguments = r"\{\}" if schema is None else json_schema_regex(schema)
        except InvalidGuide as error:
            raise InvalidGuide(what=index, reason=error.fields["reason"]) from error
        return rf'\{{"name": ?{constant(name)}, ?"{self.syntax.arguments}": ?{arguments}\}}'


def _without(mark: str) -> str:
    """Expression for texts in which ``mark`` does not occur. The first character of ``mark`` must occur in it only
    once. A mismatch after it then cannot be inside of another beginning of the mark."""
    first, rest = mark[0], mark[1:]
    assert first not in rest
    other = rf"[^{re.escape(first)}\x{{10FFFE}}\x{{10FFFF}}]"
    # Text between two first characters: it must not be the whole rest of the mark.
    between = ""
    for char in reversed(rest):
        differs = rf"[^{re.escape(first)}{re.escape(char)}\x{{10FFFE}}\x{{10FFFF}}]{other}*"
        between = rf"(?:{differs}|{re.escape(char)}{between})?" if between else rf"(?:{differs})?"
    return rf"{other}*(?:{re.escape(first)}{between})*"
