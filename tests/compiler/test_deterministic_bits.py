"""``deterministic=True``: every tier gives the K=0 tier's logits, in every bit."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import speccompile
from benchmarks.exactness import text_and_logits

TIERS = (0, 1, 3)
TINY = {"initializer_range": 0.1}


@pytest.mark.parametrize(
    ("backend", "mode"),
    [("eager", {"mode": "ngram"}), ("inductor", {"mode": "early_exit", "exit_layer": 1})],
    ids=["eager", "inductor"],
)
def test_all_tiers_have_the_plain_decoders_bits(model: LlamaForCausalLM, backend: str, mode: dict) -> None:  # type: ignore[type-arg]
    spec = speccompile.wrap(model, tiers=TIERS, max_len=120, backend=backend, deterministic=True, **mode)
    prompt = torch.randint(1, 128, (23,), generator=torch.Generator().manual_seed(3)).tolist() * 2
    tokens, logits = text_and_logits(spec, prompt, 0, 40)
    for draft_len in TIERS[1:]:
        other_tokens, other_logits = text_and_logits(spec, prompt, draft_len, 40)
        assert other_tokens == tokens
        assert torch.equal(other_logits, logits)
        assert spec.stats.accepted_tokens > 0, "without an accepted draft nothing was compared"


def test_neighbours_change_no_token(model: LlamaForCausalLM) -> None:
    spec = speccompile.wrap(
        model,
        mode="ngram",
        tiers=TIERS,
        max_batch=3,
        max_len=120,
        backend="eager",
        deterministic=True,
        policy=f"fixed:{max(TIERS)}",
    )
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(1, 128, (3, 12), generator=generator)
    alone = [spec.generate(row[None], max_new_tokens=40)[0] for row in prompts]
    together = spec.generate(prompts, max_new_tokens=40)
    assert torch.equal(torch.stack(alone), together)
