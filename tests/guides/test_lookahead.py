"""Patterns that look ahead are several patterns that all match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import json_schema_guide
from speccompile.guides.lookahead import without_lookaheads
from support.errors import raises
from support.guide_tokenizers import byte_level, token_ids

TEXTS = st.text("ab.", max_size=7)
#: zod's ``email``.
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


@settings(deadline=None, max_examples=400)
@given(
    word=st.text("ab.", min_size=1, max_size=3),
    form=st.sampled_from(["(?!{})", "(?!{}$)", "(?!.*{})", "(?!.*{}$)"]),
    text=TEXTS,
)
def test_what_must_not_follow(word: str, form: str, text: str) -> None:
    pattern = f"^{form.format(re.escape(word))}[ab.]*$"
    parts = without_lookaheads(pattern)
    assert len(parts) == 2 and "(?!" not in "".join(parts)
    assert all(re.search(part, text) for part in parts) == bool(re.search(pattern, text)), parts


@given(text=TEXTS)
def test_what_must_follow(text: str) -> None:
    pattern = r"^(?=.*b)(?=[^)]*a(?:b|\.))(?!b)[ab.]+"
    parts = without_lookaheads(pattern)
    assert len(parts) == 4 and parts[-1] == "^[ab.]+"
    assert all(re.search(part, text) for part in parts) == bool(re.search(pattern, text))


def test_patterns_without_lookahead_stay() -> None:
    assert without_lookaheads("a(?:b)$") == ["a(?:b)$"]


def test_an_email_of_zod() -> None:
    guide = json_schema_guide({"type": "string", "format": "email", "pattern": EMAIL}, byte_level())
    good = ["a@b.co", "a.b+c@d-e.f.org"]
    bad = [".a@b.co", "a..b@c.co", "a@b", "a@b.c"]
    assert [guide.matches(token_ids(guide, f'"{text}"')) for text in [*good, *bad]] == [True] * 2 + [False] * 4


@pytest.mark.parametrize(
    "pattern", ["^(?!a+)b", "^(?!.*" + "a" * 9 + ")b", "^(?!a|b)c", "a(?!b)", "^(?!a)b|c", "^(?!(a"]
)
def test_other_lookaheads_are_refused(pattern: str) -> None:
    with raises(InvalidGuide):
        json_schema_guide({"type": "string", "pattern": pattern}, byte_level())
