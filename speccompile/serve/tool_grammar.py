"""Syntax of tool calls in a model's text, and the grammar of texts that may have calls.
:mod:`~speccompile.serve.tool_reader` parses them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from speccompile.errors import InvalidGuide
from speccompile.guides.json_schema import followed_schema, schema_text
from speccompile.serve.closed_arguments import close_arguments
from speccompile.serve.guide_source import lark_of

#: Index of :attr:`ToolGrammar.answer` in errors. Tools have their own indices.
ANSWER = -1
#: Terminal of a text without a call, where calls have no marks.
_OTHER = "OTHER"


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
class GrammarTool:
    """A tool in a grammar.

    Args:
        name: of its function.
        parameters: JSON schema of the arguments; None is a function without parameters.
        strict: refuse a schema that cannot be followed as a whole.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


@dataclass(frozen=True)
class ToolGrammar:
    """Grammar of the texts that a choice of tools allows.

    Args:
        required: whether there must be a call. Otherwise text may precede calls, or replace them.
        parallel: whether there may be several calls. Without marks there is at most one.
        answer: structure of a text without calls: the kind of its source, ``json_schema``, ``regex``, ..., and the
            source. With it, text before calls is not allowed.
    """

    tools: tuple[GrammarTool, ...]
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
        tools = tuple(GrammarTool(**tool) for tool in given["tools"])
        answer = None if given["answer"] is None else tuple(given["answer"])
        return ToolGrammar(tools, CallSyntax(**given["syntax"]), given["required"], given["parallel"], answer)

    def lark(self) -> tuple[str, tuple[str, ...]]:
        """The grammar in Lark's syntax, and the parts of the tools' schemas that it does not follow.

        Raises:
            InvalidGuide: a schema is not supported. ``fields["what"]`` is the tool's index, or :data:`ANSWER`.
        """
        loosened: list[str] = []
        rules = [rule for index in range(len(self.tools)) for rule in self._call(index, loosened)]
        opening, closing = (json.dumps(mark) for mark in (self.syntax.opening, self.syntax.closing))
        one = " | ".join(f"call_{index}" for index in range(len(self.tools)))
        if not self.syntax.opening:
            calls, text = "call", f'| {_OTHER} | ""'
            rules += [f"call: {one}", f"{_OTHER}: /[^{{](.|\\n)*/"]
        else:
            rest = f" (/\\n?/ {opening} call)* /\\n?/" if self.parallel else ""
            calls, text = f"{opening} call{rest}", f"| text_open call{rest} | TEXT"
            rules += [
                f"call: /\\n?/ ({one}) /\\n?/ {closing}",
                f"text_open[lazy]: ANY {opening}",
                "ANY: /(.|\\n)*/",
                f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{_in_regex(self.syntax.opening)}(.|\\n)*/",
            ]
        if self.answer is not None:
            text = "| answer"
            rules.append(f"answer: {self._answer(*self.answer)}")
        start = calls if self.required else f"{calls} {text}"
        return "\n".join([f"start: {start}", *rules]), tuple(loosened)

    def _answer(self, kind: str, source: str) -> str:
        try:
            return lark_of(kind, source)
        except InvalidGuide as error:
            raise InvalidGuide(what=ANSWER, reason=error.fields["reason"]) from error

    def _call(self, index: int, loosened: list[str]) -> list[str]:
        """Rules of the calls of a tool."""
        tool, given = self.tools[index], self.tools[index].parameters
        if tool.strict and given is not None and given.get("type", "object") != "object":
            raise InvalidGuide(what=index, reason="the type of arguments must be object")
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{self.syntax.arguments}": '
        try:
            schema = {**({"maxProperties": 0} if given is None else close_arguments(given)), "type": "object"}
            if not self.syntax.opening and self.answer is not None:
                # The lexer would read ``head`` as one lexeme where an answer that begins like it has several.
                schema, head = self._whole_call(tool.name, schema), ""
            followed, left_out = followed_schema(schema_text(schema), strict=tool.strict)
        except InvalidGuide as error:
            raise InvalidGuide(what=index, reason=error.fields["reason"]) from error
        loosened += [f"{tool.name}: {part}" for part in left_out]
        if not head:
            return [f"call_{index}: %json {followed}"]
        return [f'call_{index}: {json.dumps(head)} arguments_{index} "}}"', f"arguments_{index}: %json {followed}"]

    def _whole_call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Schema of a call whose arguments have the schema ``arguments``."""
        definitions = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
        own = {key: value for key, value in arguments.items() if key not in definitions}
        properties = {"name": {"const": name}, self.syntax.arguments: own}
        whole = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return whole | definitions


def _in_regex(mark: str) -> str:
    """``mark`` as a part of a regular expression between slashes."""
    return re.escape(mark).replace("/", r"\/")
