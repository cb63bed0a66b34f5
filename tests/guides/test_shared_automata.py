"""Texts of one guide share an automaton with a limit: no text fails for what other texts have read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
import torch

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide, regex_guide
from speccompile.guides.matcher import TextMatcher
from speccompile.sampling.guide import GuideFollower
from support.errors import raises
from support.guide_tokenizers import EOS, common, token_ids

VOCAB = 300
#: The state after a text is that of its last 31 letters, so that random texts share few.
PATTERN = "[ab]*a[ab]{30}"
#: States for one text or two of 60 letters.
STATES = 800


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> Guide:
    """A guide whose automaton has room for a few texts."""

    def limited(tokens: Any, grammar: str, *, log_level: int, limits: Any = None) -> Any:
        limits = llguidance.LLParserLimits(max_lexer_states=STATES)
        return llguidance.LLMatcher(tokens, grammar, log_level=log_level, limits=limits)

    names = {"LLMatcher": limited, "LLParserLimits": llguidance.LLParserLimits}
    monkeypatch.setattr("speccompile.guides.guide.llguidance", lambda: SimpleNamespace(**names))
    return regex_guide(PATTERN, common())


def letters(guide: Guide, seed: int, count: int) -> list[int]:
    return token_ids(guide, "".join(random.Random(seed).choices("ab", k=count)))


def follow(matcher: TextMatcher, ids: list[int]) -> int:
    """The number of the first ids that are read, with the mask after each."""
    for index, token in enumerate(ids):
        if not matcher.read([token]) or not any(matcher.bitmask()):
            return index
    return len(ids)


def test_many_texts_one_after_the_other(guide: Guide) -> None:
    texts = [letters(guide, seed, 60) for seed in range(40)]
    automata: dict[int, object] = {}
    for ids in texts:
        assert follow(TextMatcher(guide), ids) == len(ids)
        automata[id(guide.automaton())] = guide.automaton()
    assert len(automata) > 1, "one automaton had room for all"


def test_texts_at_the_same_time(guide: Guide) -> None:
    texts = [letters(guide, seed, 60) for seed in range(40)]
    matchers = [TextMatcher(guide) for _ in texts]
    assert [follow(matcher, ids) for matcher, ids in zip(matchers, texts, strict=True)] == list(map(len, texts))
    assert not all(matcher._is_shared for matcher in matchers)


def test_texts_on_a_full_automaton_do_not_free_the_new_one(guide: Guide) -> None:
    old = [TextMatcher(guide) for _ in range(3)]
    follow(TextMatcher(guide), letters(guide, 0, 600))
    new = guide.automaton()
    for seed, matcher in enumerate(old):
        assert follow(matcher, letters(guide, seed, 60)) == 60
    assert guide.automaton() is new


def test_texts_match_whatever_others_have_read(guide: Guide) -> None:
    for seed in range(30):
        follow(TextMatcher(guide), letters(guide, seed, 60))
        assert all(guide.matches(letters(guide, 1000 + 10 * seed + text, 25), whole=False) for text in range(5))


def test_a_new_automaton_continues_where_the_text_is(guide: Guide) -> None:
    matcher, ids = TextMatcher(guide), letters(guide, 0, 60)
    plain = llguidance.LLMatcher(guide.tokens.for_llguidance, guide.grammar, log_level=0)
    for index, token in enumerate(ids):
        # Another text uses up all states, so that this one begins again at several places.
        if index % 7 == 0:
            follow(TextMatcher(guide), letters(guide, 100 + index, 600))
        assert matcher.read([token]) == 1 and plain.consume_tokens([token])
        matcher.unread(matcher.read(ids[index + 1 : index + 3]))
        assert matcher.bitmask() == plain.compute_bitmask() and matcher.is_complete() == plain.is_accepting()
    assert not matcher._is_shared


def test_a_text_that_needs_too_much_ends_alone(guide: Guide) -> None:
    prompt = [5]
    follower = GuideFollower(guide, [EOS], VOCAB, len(prompt))
    with raises(InvalidGuide, reason="lexer error: too many states: 800 >= 800"):
        for index, token in enumerate(ids := letters(guide, 1, 2000)):
            list(follower.masks(torch.tensor([*prompt, *ids[:index]]), [token]))
    ids = letters(guide, 2, 60)
    other = GuideFollower(guide, [EOS], VOCAB, len(prompt))
    assert other.allowed(torch.tensor(prompt), ids) == len(ids)
