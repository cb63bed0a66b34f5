"""A head that learns from served texts on a GPU drafts better, and the text stays what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speccompile import Speculator
from speccompile.heads import Eagle3Head
from speccompile.training import OnlineTraining
from support.gpu_texts import own_texts, wrapped
from support.training_data import TAPS, VOCAB, learnable

pytestmark = pytest.mark.gpu

K, NEW = 3, 29
LEARN: dict[str, Any] = {"share": 0.0, "learning_rate": 5e-3, "ring_tokens": 4096, "judge_tokens": 128, "unroll": K}


def serve(spec: Speculator, count: int, seed: int) -> float:
    """Acceptance length over texts, which are the model's own."""
    prompts = torch.randint(VOCAB, (count, 3), generator=torch.Generator().manual_seed(seed)).tolist()
    spec.set_tier(K)
    requests = [spec.engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
    texts = [request.result().token_ids for request in requests]
    assert texts == own_texts(learnable(), prompts, NEW)
    emitted, steps = (sum(getattr(r.stats, name) for r in requests) for name in ("emitted_tokens", "row_steps"))
    return float(emitted / steps)


@pytest.mark.parametrize("mode", ["eagle3_one_model", "eagle3"])
def test_it_drafts_better(mode: str) -> None:
    model = learnable().cuda()
    head = Eagle3Head.random(model, taps=TAPS, draft_vocab_size=VOCAB)
    with wrapped(model, mode, draft=head, learn=OnlineTraining(**LEARN), max_len=48) as spec:
        first, before = serve(spec, 20, 1), spec.arena.fingerprint()
        learnt = spec.learn(60)
        assert learnt.steps == 60 and learnt.taken
        assert first < 1.5 and serve(spec, 10, 2) > 2.0
        assert spec.arena.fingerprint() == before
