"""The text of tokens that arrive a few at a time, after a prompt."""

from __future__ import annotations

import itertools
import random

import pytest

from speccompile.runtime.detokenizer import Detokenizer, text_of
from support.guide_tokenizers import sentencepiece_like
from support.serving import tokenizer

PIECES = ("\u2581the", "\u2581", "end", "é")


def joined(detokenizer: Detokenizer, ids: list[int], rng: random.Random) -> str:
    """The pieces of ``ids``, of which a few arrive at a time."""
    text, start = "", 0
    while start < len(ids):
        size = rng.randint(1, 3)
        text += detokenizer.add(ids[start : start + size])
        start += size
    return text + detokenizer.end()


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_pieces_join_to_the_text_of_all_tokens(kind: str) -> None:
    made = tokenizer() if kind == "bytes" else sentencepiece_like(*PIECES)
    rng = random.Random(0)
    for _ in range(200):
        text = " ".join(rng.choices(["é", "🙂", "the", "end", "a", "\n"], k=rng.randint(0, 9)))
        ids = made(text, add_special_tokens=False)["input_ids"]
        if kind == "bytes":
            # Also bytes that are not text. Of such bytes the other decoder's text depends on those that follow.
            ids = rng.choices(range(len(made)), k=rng.choice([0, 3, 40])) + ids
        expected = made.decode(ids, skip_special_tokens=True)
        assert joined(Detokenizer(made), ids, rng) == text_of(made, [], ids) == expected


def test_the_text_continues_that_of_the_prompt() -> None:
    """The decoder strips the first space of a text, which is not the first one of the new tokens."""
    made, rng = sentencepiece_like(*PIECES), random.Random(1)
    the, space, end, eos = (*made.convert_tokens_to_ids(["\u2581the", "\u2581", "end"]), made.eos_token_id)
    smile = made("🙂", add_special_tokens=False)["input_ids"]
    for _ in range(100):
        # A long prompt is decoded from its last tokens on, which may begin within a character.
        prompt, new = (
            [token for word in rng.choices([[the], [space], [end], [eos], smile], k=count) for token in word]
            for count in (rng.choice([0, 1, 3, 30]), 5)
        )
        before, text = (made.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + new))
        assert before + joined(Detokenizer(made, prompt), new, rng) == text
    assert text_of(made, [the], [space, space, the]) == "   the" and text_of(made, [eos], [the]) == "the"


def test_new_tokens_may_complete_a_character_of_the_prompt() -> None:
    made = tokenizer()
    ids = made("a🙂b")["input_ids"]
    assert [text_of(made, ids[:end], ids[end:]) for end in range(len(ids))] == ["a🙂b", *["🙂b"] * 4, "b"]
    # This character stands for nothing but itself.
    assert text_of(made, made("a\ufffd")["input_ids"], ids[-1:]) == "b"


def test_a_character_of_several_tokens_comes_whole() -> None:
    detokenizer = Detokenizer(tokenizer())
    pieces = [detokenizer.add([token]) for token in tokenizer()("a🙂b")["input_ids"]]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    # Text that is complete does not wait for a character after it.
    first, *_ = tokenizer()("🙂")["input_ids"]
    assert detokenizer.add([*tokenizer()("c")["input_ids"], first]) == "c"


@pytest.mark.parametrize("endless", ["byte", "special"])
def test_tokens_that_never_become_text_are_not_decoded_again_and_again(endless: str) -> None:
    made = tokenizer()
    byte, special = made("🙂")["input_ids"][-1], made.eos_token_id
    decoded: list[int] = []

    class Counts:
        def decode(self, ids: list[int], **keywords: bool) -> str:
            decoded.append(len(ids))
            return str(made.decode(ids, **keywords))

    detokenizer = Detokenizer(Counts())
    tokens = [byte if endless == "byte" else special] * 200
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.end()
    assert text == made.decode(tokens, skip_special_tokens=True) and max(decoded) < 50


def test_tokens_without_a_text_may_stand_within_a_character() -> None:
    """Ids that the tokenizer does not have, between bytes of characters and bytes that form none."""
    known, rng = tokenizer(), random.Random(0)
    nothing, *some = 277, 131, 119, 124, 116, 250, 187, 84, 21, 303
    assert known.decode([nothing]) == ""
    prompt = known("the end")["input_ids"]
    ids = [
        21,
        277,
        250,
        187,
        83,
        184,
        216,
        303,
        99,
        212,
        131,
        277,
        277,
        277,
        277,
        277,
        119,
        124,
        116,
        277,
        277,
        277,
        119,
    ]
    detokenizer, parts = Detokenizer(known, prompt), (3, 4, 6, 9, 11, 14, 18, 19, 20, 22, 23)
    text = "".join(detokenizer.add(ids[start:end]) for start, end in itertools.pairwise((0, *parts)))
    assert text + detokenizer.end() == known.decode(ids)
    for _ in range(300):
        tokens = [rng.choice([nothing, nothing, *some]) for _ in range(rng.randint(5, 40))]
        assert joined(Detokenizer(known, prompt), tokens, rng) == known.decode(tokens), tokens
