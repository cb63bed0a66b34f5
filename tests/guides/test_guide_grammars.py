"""Guides of context-free grammars, in Lark's syntax and in GBNF."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from speccompile.errors import InvalidGuide
from speccompile.guides import grammar_guide
from support.errors import raises
from support.guide_tokenizers import EOS, allowed, byte_level, common, token_ids

LARK = r"""
start: group+
group: "(" group* ")" | "[" group* "]"
"""
GBNF = r"""
root ::= group+
group ::= "(" group* ")" | "[" group* "]"
"""
BRACKETS = {"lark": grammar_guide(LARK, byte_level("((", "))", "()", "](")), "gbnf": grammar_guide(GBNF, byte_level())}


def is_balanced(text: str) -> bool:
    while text != (text := text.replace("()", "").replace("[]", "")):
        pass
    return not text


@pytest.mark.parametrize("syntax", BRACKETS)
@given(st.text("()[]", max_size=8))
def test_a_recursive_grammar_matches_balanced_brackets(syntax: str, text: str) -> None:
    guide = BRACKETS[syntax]
    assert guide.matches(token_ids(guide, text)) == (text != "" and is_balanced(text))


@pytest.mark.parametrize("syntax", BRACKETS)
def test_brackets_of_any_depth_are_closed_in_order(syntax: str) -> None:
    guide, rng = BRACKETS[syntax], random.Random(4)
    opened = "".join(rng.choice("([") for _ in range(60))
    ids = token_ids(guide, opened)
    for bracket in reversed(opened):
        closing = {"(": ")", "[": "]"}[bracket]
        after = {guide.tokens.texts[token].decode()[0] for token in allowed(guide, ids)}
        assert after == {"(", "[", closing}
        assert not guide.matches(ids)
        ids += token_ids(guide, closing)
    assert guide.matches(ids)


def test_a_grammar_may_name_a_special_token() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|call|>", special=True)])
    call = len(tokenizer) - 1
    guide = grammar_guide('start: <|call|> "a" | "b"', tokenizer)
    (a,), (b,) = token_ids(guide, "a"), token_ids(guide, "b")
    assert allowed(guide, []) == sorted([call, b])
    assert guide.matches([call, a]) and guide.matches([b])
    assert not guide.matches(token_ids(guide, "<|call|>a")) and not guide.matches([EOS, a])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "a grammar must be a str that is not empty"),
        (" \n", "a grammar must be a str that is not empty"),
        (5, "a grammar must be a str that is not empty"),
        ('start: "(" start* ")', "lexer error"),
        ("start: other", "other"),
        ('start: <|unknown|> "a"', 'unknown special token: "<|unknown|>"'),
        ("root ::= [a", "Failed to convert the grammar from GBNF"),
        ("start: start", "no sequence of the tokenizer's tokens matches it"),
    ],
)
def test_bad_grammars_are_refused_with_a_reason(grammar: Any, message: str) -> None:
    with raises(InvalidGuide, reason=re.compile(re.escape(message))):
        grammar_guide(grammar, common())
