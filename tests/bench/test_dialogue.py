"""Turns of a conversation as token ids."""

from __future__ import annotations

import re

import pytest

from speccompile.bench.dialogue import longest_sequence, turn_ids
from speccompile.bench.prompt_files import BenchPrompt
from speccompile.cli.models import encode, tiny_tokenizer
from speccompile.errors import InvalidOption
from support.errors import raises

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TWO = BenchPrompt("a", "qa", ("Hello", "And now?"), system="Be brief.")


def text(ids: list[int]) -> str:
    return str(tiny_tokenizer().decode(ids))


def test_a_turn_continues_the_models_own_answer() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert text(turn_ids(tokenizer, TWO)) == "<system>Be brief.<user>Hello<assistant>"
    answer = tokenizer("Hi!")["input_ids"]
    second = "<system>Be brief.<user>Hello<assistant>Hi!<user>And now?<assistant>"
    assert text(turn_ids(tokenizer, TWO, [answer])) == second
    only = BenchPrompt("b", "qa", ("Hello",))
    assert turn_ids(tokenizer, only) == encode(tokenizer, "Hello")[0].tolist()


@pytest.mark.parametrize("templated", [False, True])
def test_without_a_template_turns_are_joined(templated: bool) -> None:
    tokenizer = tiny_tokenizer()
    prompt = BenchPrompt("b", "qa", ("Hello", "And now?"), chat=False)
    if templated:
        tokenizer.chat_template = TEMPLATE
    answer = tokenizer(" there")["input_ids"]
    assert text(turn_ids(tokenizer, prompt, [answer])) == "Hello there\n\nAnd now?"
    if templated:
        assert text(turn_ids(tokenizer, prompt, chat=True)) == "<user>Hello<assistant>"
    else:
        with raises(InvalidOption, name="--chat", reason=re.compile("no chat template")):
            turn_ids(tokenizer, prompt, chat=True)


def test_a_conversation_fits_with_all_of_its_answers() -> None:
    prompt = BenchPrompt("b", "qa", ("12345", "123"))
    assert longest_sequence(tiny_tokenizer(), prompt, 10, None) == 5 + 10 + 2 + 3 + 10
