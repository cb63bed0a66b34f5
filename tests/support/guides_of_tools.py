"""Texts of calls, and what a grammar of tools allows with the tiny server's tokenizer."""

from __future__ import annotations

from speccompile.guides import Guide
from speccompile.serve.guide_process import compile_guide
from speccompile.serve.guide_source import GuideSource
from speccompile.serve.tool_grammar import CallSyntax, ToolGrammar
from support.serving import tokenizer


def call_text(syntax: CallSyntax, name: str = "weather", arguments: str = '{"city": "Oslo"}') -> str:
    return f'{syntax.opening}\n{{"name": "{name}", "{syntax.arguments}": {arguments}}}\n{syntax.closing}'.strip()


def guide_of(grammar: ToolGrammar) -> Guide:
    return compile_guide(GuideSource("tools", grammar.as_text()), tokenizer())


def allows(grammar: ToolGrammar, text: str) -> bool:
    return guide_of(grammar).matches(tokenizer()(text, add_special_tokens=False)["input_ids"])
