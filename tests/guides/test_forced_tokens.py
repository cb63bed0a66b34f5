"""Tokens that a guide forces are drafts: accepted in one step, and the text is the same as without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from speccompile import Speculator, wrap
from speccompile.guides import Guide, json_schema_guide, regex_guide
from speccompile.runtime.policy_inputs import policy_rows
from speccompile.runtime.stats import GUIDE_SOURCE
from support.drafters import random_drafter
from support.guide_tokenizers import EOS, common
from support.tiny import tiny_llama

VOCAB = 300
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "cba"]}, "is it there": {"type": "boolean"}, "a": {"type": "string"}},
    "required": ["name", "is it there", "a"],
    "additionalProperties": False,
}
MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ngram": ("ngram", {}),
    "suffix": ("suffix", {}),
    "recycle": ("recycle", {}),
    "before a network": (["ngram", "draft_target"], {"draft": random_drafter(vocab=VOCAB)}),
}


@pytest.fixture(scope="module", params=MODES)
def spec(request: pytest.FixtureRequest) -> Iterator[Speculator]:
    mode, options = MODES[request.param]
    sizes: dict[str, Any] = {"tiers": (0, 7), "max_batch": 2, "max_len": 120, "backend": "eager", "policy": "fixed:7"}
    with wrap(tiny_llama(vocab=VOCAB), mode, **sizes, **options) as made:
        yield made


def text_of(spec: Speculator, guide: Guide, draft_len: int, **options: Any) -> tuple[list[int], int]:
    """A text, and how many of its tokens were drafts."""
    spec.set_tier(draft_len)
    request = spec.engine.submit([5, 6, 7], max_new_tokens=60, eos_token_id=[EOS], guide=guide, **options)
    return request.result().token_ids, request.stats.accepted_tokens


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 4, "temperature": 1.5}])
def test_forced_tokens_are_accepted_and_change_nothing(spec: Speculator, options: dict[str, Any]) -> None:
    guide = json_schema_guide(SCHEMA, common())
    plain, drafted = text_of(spec, guide, 0, **options), text_of(spec, guide, 7, **options)
    assert plain[0] == drafted[0]
    assert drafted[1] > len(drafted[0]) / 3, "most of the names and of the punctuation"


def test_a_text_without_a_choice_is_drafted_as_a_whole(spec: Speculator) -> None:
    guide = regex_guide("the only text that there is, and it is long", common())
    text, accepted = text_of(spec, guide, 7)
    assert common().decode(text[:-1]) == guide.text
    # Each step of 7 drafts adds one token of its own; the last token is the end.
    assert accepted >= (len(text) - 1) * 7 // 8 - 7


def test_forced_tokens_stop_at_the_limit_of_the_request(spec: Speculator) -> None:
    guide = regex_guide("the only text that there is, and it is long", common())
    spec.set_tier(7)
    for most in (1, 2, 9):
        request = spec.engine.submit([5, 6], max_new_tokens=most, eos_token_id=[EOS], guide=guide)
        assert len(request.result().token_ids) == most and request.stats.accepted_tokens < most
    none = spec.engine.submit([5, 6], max_new_tokens=9, eos_token_id=[EOS], guide=guide, num_draft_tokens=0)
    assert len(none.result().token_ids) == 9 and none.stats.accepted_tokens == 0


def test_forced_tokens_are_counted_as_drafts_of_the_guide(spec: Speculator) -> None:
    guide = json_schema_guide(SCHEMA, common())
    spec.set_tier(7)
    request = spec.engine.submit([5, 6, 7], max_new_tokens=60, eos_token_id=[EOS], guide=guide)
    text = common().decode(request.result().token_ids)
    by_guide = [source == GUIDE_SOURCE for source in request.drafted_by]
    # The name of the second property has one spelling. Its first token may be a step's own.
    first = len(common().encode(text[: text.index("is it there")]))
    assert all(by_guide[first + 2 : first + 6]) and sum(by_guide) > len(by_guide) / 4
    drafts, accepted = request.stats.drafts_by[GUIDE_SOURCE]
    assert drafts >= accepted == sum(by_guide)
    others = [right for source, (_, right) in request.stats.drafts_by.items() if source != GUIDE_SOURCE]
    assert accepted + sum(others) == request.stats.accepted_tokens


def test_forced_drafts_are_certain_for_policies(spec: Speculator) -> None:
    guide = regex_guide("the only text that there is, and it is long", common())
    spec.set_tier(7)
    request = spec.engine.submit([5, 6, 7], max_new_tokens=60, eos_token_id=[EOS], guide=guide)
    while not request.new_tokens:
        spec.engine.step()
    (row,) = policy_rows([request], spec.arena, 7, ready=True, scores=True)
    request.cancel()
    assert row.draft_len == 7 and row.scores == (1.0,) * 7 and row.found
