"""Texts that arrive in pieces, and stop strings."""

from __future__ import annotations

import random

import torch

from speccompile.serve.text import AnswerText, StopFilter, StopTexts
from support.serving import tokenizer


def test_a_text_is_cut_at_the_first_stop_however_it_arrives() -> None:
    rng = random.Random(1)
    for _ in range(500):
        text = "".join(rng.choices("ab", k=rng.randint(0, 12)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
        expected = text[: min(ends)[1]] if ends else text
        held, shown, start = StopFilter(stops), "", 0
        while start < len(text):
            size = rng.randint(1, 4)
            shown += held.add(text[start : start + size])
            # Nothing is shown that a stop may still take away.
            assert expected.startswith(shown)
            start += size
        assert shown + held.end() == expected and held.stopped == bool(ends)


def test_no_stop_string_ends_in_the_first_tokens() -> None:
    """It may begin there. A shorter stop string within the beginning of a longer one does not count either."""
    rng, stops = random.Random(2), ["abcb", "bc", "cc"]
    for _ in range(300):
        text, least = "".join(rng.choices("abc", k=12)), rng.randint(0, 12)
        ends = [
            (place + len(stop), place)
            for stop in stops
            for place in range(len(text))
            if text.startswith(stop, place) and place + len(stop) > least
        ]
        ids, shown, start = tokenizer()(text)["input_ids"], "", 0
        answer = AnswerText(tokenizer(), [], stops, least)
        assert len(ids) == len(text), "each token is a character"
        while start < len(ids):
            size = rng.randint(1, 4)
            shown += answer.add(ids[start : start + size])
            start += size
        assert shown + answer.end() == (text[: min(ends)[1]] if ends else text) and answer.stopped == bool(ends)


def test_a_criterion_looks_at_new_text_alone() -> None:
    x, b, c = tokenizer()("xbc")["input_ids"]
    criterion = StopTexts(AnswerText(tokenizer(), [x, b], ["bc"]))
    seen = [criterion(torch.tensor([[x, b, *new]]), None) for new in ([c], [c, b], [c, b, c])]
    assert seen == [False, False, True]
