"""Guides and logits processors of the user's own in whole steps on a GPU. Texts are transformers' on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import LogitsProcessor, LogitsProcessorList

from speccompile import Tree
from speccompile.guides import Guide, regex_guide
from support.gpu_texts import NEW, PROMPTS, TIERS, texts_at, wrapped
from support.guide_tokenizers import word_level
from support.tiny import tiny_llama

pytestmark = pytest.mark.gpu

VOCAB, EOS, LENGTH = 128, 0, 17


def allowed(count: int) -> list[int]:
    """Tokens that may follow after ``count`` new ones: every third one, and at last the end."""
    return [token for token in range(1, VOCAB) if token % 3 == count % 3] if count < LENGTH else [EOS]


@cache
def guide() -> Guide:
    """The guide of :func:`allowed`. Each token is the ASCII character of its id."""
    pytest.importorskip("llguidance", reason="needs llguidance, which guides follow")
    tokenizer = word_level(decoders.Metaspace(), tuple(map(chr, range(1, VOCAB))))
    classes = ["".join(rf"\x{token:02x}" for token in allowed(count)) for count in range(LENGTH)]
    return regex_guide("".join(f"[{characters}]" for characters in classes), tokenizer)


def of_transformers_guided(prompt: list[int]) -> list[int]:
    def may_follow(_: int, ids: torch.Tensor) -> list[int]:
        return allowed(len(ids) - len(prompt))

    return of_transformers(prompt, eos_token_id=EOS, prefix_allowed_tokens_fn=may_follow)


def of_transformers(prompt: list[int], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    model: Any = tiny_llama()
    output = model.generate(ids, **(given | options))
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["ngram", "draft_target"])
def test_a_guide_is_followed(mode: str) -> None:
    """A CUDA graph cannot call the host, which computes the masks before each step. It knows the drafts of a lookup by
    then, and not those of a draft model."""
    wanted = [of_transformers_guided(prompt) for prompt in PROMPTS]
    assert all(len(text) == LENGTH + 1 and text[-1] == EOS for text in wanted)
    tiers = (0, 3, Tree.dynamic(5, 3, 2)) if mode == "draft_target" else TIERS
    options = {"draft": tiny_llama().cuda()} if mode == "draft_target" else {}
    with wrapped(tiny_llama().cuda(), mode, tiers=tiers, **options) as spec:
        for tier in spec.tiers:
            assert texts_at(spec, tier, guide=guide(), eos_token_id=[EOS]) == wanted
        drawn: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "seed": 4}
        texts = [texts_at(spec, tier, guide=guide(), eos_token_id=[EOS], **drawn) for tier in spec.tiers]
        assert all(found == texts[0] for found in texts)
        assert all(token in allowed(place) for text in texts[0] for place, token in enumerate(text))
        assert (spec.stats.draft_tokens > 0) == (mode == "ngram")
        # A row without a guide has drafts.
        spec.set_tier(3)
        guided = spec.engine.submit(PROMPTS[0], max_new_tokens=NEW, eos_token_id=[EOS], guide=guide())
        free = spec.engine.submit(PROMPTS[1], max_new_tokens=NEW, eos_token_id=[])
        assert [request.result().token_ids for request in (guided, free)] == [wanted[0], of_transformers(PROMPTS[1])]
        assert (guided.stats.draft_tokens > 0) == (mode == "ngram")
        assert free.stats.draft_tokens > 0


def test_a_complete_sequence_ends_before_the_least_number_of_tokens() -> None:
    with wrapped(tiny_llama().cuda(), "ngram") as spec:
        options: dict[str, Any] = {"guide": guide(), "eos_token_id": [EOS], "min_new_tokens": LENGTH + 3}
        assert texts_at(spec, 3, **options) == [of_transformers_guided(prompt) for prompt in PROMPTS]


class AfterLast(LogitsProcessor):
    """A table of what may follow what."""

    def __init__(self) -> None:
        self.table = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + self.table[input_ids[:, -1]]


def fold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.where(scores > 1.5, scores - 3.0, scores)


def test_processors_of_the_users_own() -> None:
    wanted = [of_transformers(prompt, logits_processor=LogitsProcessorList([AfterLast(), fold])) for prompt in PROMPTS]
    there = AfterLast()
    there.table = there.table.cuda()
    with wrapped(tiny_llama().cuda(), "ngram", logits_processor=[there, fold]) as spec:
        assert all(texts_at(spec, tier) == wanted for tier in TIERS)
