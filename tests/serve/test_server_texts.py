"""Texts that arrive in pieces: characters of several tokens, and stop strings."""

from __future__ import annotations

import random

import pytest
import torch

from speccompile.serve.text import Decoder, StopFilter, StopTexts
from support.guide_tokenizers import sentencepiece_like
from support.serving import VOCAB, tokenizer


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_pieces_join_to_the_text_of_all_tokens(kind: str) -> None:
    made = tokenizer() if kind == "bytes" else sentencepiece_like("\u2581the", "\u2581", "end", "é")
    rng = random.Random(0)
    for _ in range(200):
        text = " ".join(rng.choices(["é", "🙂", "the", "end", "a", "\n"], k=rng.randint(0, 9)))
        ids = made(text, add_special_tokens=False)["input_ids"]
        if kind == "bytes":
            # Also bytes that are not text. Of such bytes the other decoder's text depends on those that follow.
            ids = rng.choices(range(len(made)), k=rng.randint(0, 9)) + ids
        decoder, text, start = Decoder(made), "", 0
        while start < len(ids):
            size = rng.randint(1, 3)
            text += decoder.add(ids[start : start + size])
            start += size
        assert text + decoder.end() == made.decode(ids, skip_special_tokens=True)


def test_a_character_of_several_tokens_comes_whole() -> None:
    decoder = Decoder(tokenizer())
    pieces = [decoder.add([token]) for token in tokenizer()("a🙂b")["input_ids"]]
    assert pieces == ["a", "", "", "", "🙂", "b"]


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


def test_a_criterion_looks_at_new_text_alone() -> None:
    criterion = StopTexts(tokenizer(), ["bc"])
    ids = tokenizer()("xbc", add_special_tokens=False)["input_ids"]
    seen = [criterion(torch.tensor([[9, 9, *ids[: end + 1]]]), None) for end in range(len(ids))]
    assert seen == [False, False, True]
    assert max(ids) < VOCAB
