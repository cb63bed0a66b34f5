"""On CUDA linears in half precision are one op; the printed step computes the model's own logits with it."""

from __future__ import annotations

import torch

import speccompile
from support.as_on_cuda import AS_ON_CUDA
from support.tiny import greedy, random_prompt, tiny_llama

OPTIONS = {"tiers": (0, 3), "max_batch": 1, "max_len": 60, "backend": AS_ON_CUDA}


def test_every_linear_in_half_precision_is_the_op() -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:  # type: ignore[arg-type]
        # Queries, keys and values; attention's output; gate and up; down: of two layers, and the lm_head.
        assert spec.stages["use_skinny_linears"].changes.count == 9
        ids = random_prompt(12)
        assert spec.check([ids, ids * 2], max_new_tokens=12)


def test_linears_in_float32_stay() -> None:
    model = tiny_llama()
    with speccompile.wrap(model, "ngram", **OPTIONS) as spec:  # type: ignore[arg-type]
        assert spec.stages["use_skinny_linears"].changes.count == 0
        assert spec.generate(torch.tensor([[5, 6, 7, 5, 6, 7]]), max_new_tokens=8)[0, 6:].tolist() == greedy(
            model, [5, 6, 7, 5, 6, 7], 8
        )
