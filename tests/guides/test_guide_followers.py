"""The follower of one request: masks of allowed tokens after drafts, and the request's EOS tokens."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, choice_guide, json_schema_guide, regex_guide
from speccompile.sampling.allowed import Bits
from speccompile.sampling.guide import GuideFollower, followers, greatest, keep
from support.errors import raises
from support.guide_tokenizers import EOS, allowed, byte_level, common, llama_like, token_ids

VOCAB = 300


@cache
def guides() -> list[Guide]:
    schema = {"type": "array", "items": {"enum": ["ab", "abc", 12, 123]}}
    return [regex_guide("(ab|ba|c|é)*", common()), json_schema_guide(schema, common()), regex_guide("abc", common())]


def expected_mask(guide: Guide, ids: list[int], eos: tuple[int, ...]) -> set[int]:
    """From the beginning of the text. Bytes that are forced have the tokens of the tokenizer, and no others."""
    following = set(allowed(guide, ids))
    assert all(guide.matches([*ids, token], whole=False) for token in following)
    return following - set(eos) | (set(eos) if guide.matches(ids) else set())


def ids_of(mask: Bits) -> set[int]:
    assert mask.shape == (-(-VOCAB // 8),) and mask.dtype == np.uint8
    return set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


def places_of(values: torch.Tensor) -> set[int]:
    return set(values.nonzero().flatten().tolist())


@settings(deadline=None, max_examples=40)
@given(
    number=st.integers(0, 2),
    seed=st.integers(0, 2**16),
    committed=st.integers(0, 4),
    drafted=st.integers(0, 4),
    eos=st.sampled_from([(EOS,), (EOS, VOCAB - 1), (VOCAB - 1,)]),
)
def test_masks_are_those_of_each_position(
    number: int, seed: int, committed: int, drafted: int, eos: tuple[int, ...]
) -> None:
    guide, rng, prompt = guides()[number], random.Random(seed), [7, 7, 7]
    follower, text = GuideFollower(guide, eos, VOCAB, len(prompt)), list[int]()
    for _ in range(3):
        drafts: list[int] = []
        for _ in range(drafted):
            following = allowed(guide, [*text, *drafts])
            drafts += [rng.choice(following)] if following else []
        # The last draft may not be allowed.
        drafts += [rng.choice([*eos, 5, -1, VOCAB - 2])] * rng.randrange(2)
        valid = 0
        while valid < len(drafts) and guide.matches([*text, *drafts[: valid + 1]], whole=False):
            valid += 1
        tokens = torch.tensor([*prompt, *text])
        for skip in (0, 1):
            found = list(follower.masks(tokens, drafts, skip))
            expected = [expected_mask(guide, [*text, *drafts[:size]], eos) for size in range(skip, valid + 1)]
            assert [ids_of(mask) for mask in found] == expected
        next(follower.masks(tokens, drafts))
        ends = drafts[valid : valid + 1] != [] and drafts[valid] in eos and guide.matches([*text, *drafts[:valid]])
        assert follower.allowed(tokens, drafts) == valid + ends
        for _ in range(committed):
            following = allowed(guide, text)
            text += [rng.choice(following)] if following else []


@settings(deadline=None, max_examples=60)
@given(
    number=st.integers(0, 2),
    seed=st.integers(0, 2**16),
    skip=st.integers(0, 1),
    eos=st.sampled_from([(EOS,), (EOS, VOCAB - 1), (VOCAB - 1,)]),
)
def test_choices_by_few_masks_are_those_by_all(number: int, seed: int, skip: int, eos: tuple[int, ...]) -> None:
    """Up to the first draft that is not chosen. Scores prefer tokens that are allowed, other spellings of forced ones,
    EOS tokens and forbidden ones in turn, and may be -inf."""
    guide, rng, drafts = guides()[number], random.Random(seed), list[int]()
    for _ in range(rng.randrange(1, 5)):
        following = allowed(guide, drafts)
        drafts += [rng.choice(following)] if following else []
    text = torch.tensor([7])
    made = list(GuideFollower(guide, eos, VOCAB, 1).masks(text, drafts, skip))
    scores = torch.full((len(drafts) + 1 - skip, VOCAB), float("-inf"))
    for place, row in enumerate(scores):
        after = drafts[: place + skip]
        liked = rng.choice([allowed(guide, after), range(VOCAB), eos, drafts[place + skip :], [*b"abc"]]) or [5]
        row[rng.sample(range(VOCAB), rng.choice([0, 20, VOCAB]))] = 0.0
        row[rng.choice(list(liked))] = rng.choice([1.0, float("-inf")])
    by_all, by_few = scores.clone(), scores.clone()
    follower = GuideFollower(guide, eos, VOCAB, 1, chooses=True)
    for place, mask in enumerate(made):
        keep(by_all[place], mask, complete=follower.is_complete(mask))
    yielded = []
    for place, mask in follower.masks_of_choices(text, drafts, by_few.numpy(), skip):
        assert ids_of(mask) == ids_of(made[place])
        keep(by_few[place], mask, complete=follower.is_complete(mask))
        yielded.append(place)
    for place in range(len(made)):
        chosen = greatest(by_all[place].numpy())
        assert greatest(by_few[place].numpy()) == chosen
        if place + skip == len(drafts) or chosen != drafts[place + skip]:
            break
    assert max(yielded, default=0) <= place, "none after the first draft that is not chosen"
    assert next(follower.masks(text, drafts, skip)).tolist() == made[0].tolist(), "it has returned to the text"


def test_an_eos_token_that_is_an_ordinary_token_is_not_part_of_the_text() -> None:
    a, b = token_ids(guide := regex_guide("ab?|ba", byte_level()), "ab")
    follower, prompt = GuideFollower(guide, [b], VOCAB, 1), [9]
    assert [ids_of(mask) for mask in follower.masks(torch.tensor(prompt), [a])] == [{a}, {b}]
    assert follower.allowed(torch.tensor(prompt), [a, b, a]) == 2, "b ends the complete text"
    assert follower.allowed(torch.tensor(prompt), [b]) == 0
    # The text ends with b, so nothing of it is left to follow.
    (mask,) = follower.masks(torch.tensor([*prompt, a, b]), [])
    assert follower.is_complete(mask) and follower.error is None


def test_a_complete_text_only_ends() -> None:
    guide = regex_guide("ab|abc", common())
    follower = GuideFollower(guide, [EOS, VOCAB - 1], VOCAB, 0)
    a, b, c = token_ids(guide, "abc")
    masks = list(follower.masks(torch.tensor([], dtype=torch.int64), [a, b, c]))
    assert [follower.is_complete(mask) for mask in masks] == [False, False, False, True]
    scores = torch.zeros(VOCAB)
    scores[EOS] = float("-inf")
    keep(scores, masks[-1], complete=True)
    assert places_of(scores == 0.0) == {VOCAB - 1}, "a token that ends the text may be forbidden"
    scores[:] = 1.0
    scores[[EOS, VOCAB - 1]] = float("-inf")
    keep(scores, masks[-1], complete=True)
    assert places_of(scores == 0.0) == {EOS, VOCAB - 1}, "but not all of them"
    scores = torch.zeros(VOCAB)
    scores[EOS] = float("-inf")
    keep(scores, masks[2], complete=False)
    assert places_of(scores.isfinite()) == {c, VOCAB - 1}


def test_a_text_that_leaves_its_guide_is_an_error_of_its_request() -> None:
    guide = regex_guide("ab", common())
    follower = GuideFollower(guide, [EOS], VOCAB, 0)
    numbers = torch.tensor([0, follower.number, 10**6])
    assert list(followers(numbers)) == [(1, follower)], "other numbers have no follower"
    with raises(InvalidGuide, what="ab"):
        list(follower.masks(torch.tensor(token_ids(guide, "b")), []))
    assert isinstance(follower.error, InvalidGuide)
    with raises(InvalidGuide, what="ab"):
        follower.allowed(torch.tensor([], dtype=torch.int64), [])


def test_a_follower_is_forgotten_with_its_request() -> None:
    follower = GuideFollower(guides()[0], [EOS], VOCAB, 0)
    number = torch.tensor([follower.number])
    del follower
    assert list(followers(number)) == []


def test_a_forced_text_has_the_tokens_of_its_tokenizer() -> None:
    tokenizer = llama_like("ab", "abc", "abcd")
    guide, whole = regex_guide("abcd", tokenizer), tokenizer.convert_tokens_to_ids("abcd")
    assert allowed(guide, []) == [whole] and guide.matches(token_ids(guide, "abcd")), "drafts may have others"


@pytest.mark.parametrize("text", ["</s>", "a</s>b", "<|x|>"])
def test_names_of_special_tokens_in_a_text_are_ordinary_text(text: str) -> None:
    tokenizer = byte_level("</")
    tokenizer.add_tokens([AddedToken("<|x|>", special=True)])
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    for guide in (choice_guide([text], tokenizer), json_schema_guide(schema, tokenizer)):
        ids: list[int] = []
        while not guide.matches(ids):
            ids.append(allowed(guide, ids)[0])
        assert set(ids).isdisjoint(guide.tokens.special)
        assert text.encode() in b"".join(guide.tokens.texts[token] for token in ids)
