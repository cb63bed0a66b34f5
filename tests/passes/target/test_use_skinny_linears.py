"""On CUDA linears in half precision are one op, with which the step computes the model's own logits."""

from __future__ import annotations

import pytest
import torch

import speccompile
from support.as_on_cuda import as_on_cuda
from support.tiny import random_prompt, tiny_llama

OP = "speccompile.skinny_linear.default"


# Queries, keys and values; attention's output; gate and up; down: of two layers, and the lm_head.
@pytest.mark.parametrize(("dtype", "linears"), [(torch.bfloat16, 9), (torch.float32, 0)], ids=str)
def test_linears_in_half_precision_are_the_op(dtype: torch.dtype, linears: int) -> None:
    model = tiny_llama(dtype=dtype)
    options = {"tiers": (0, 3), "max_batch": 1, "max_len": 60}
    with as_on_cuda() as backend, speccompile.wrap(model, "ngram", backend=backend, **options) as spec:
        assert spec.stages["use_skinny_linears"].note == f"{linears} linears"
        assert spec.stages["use_skinny_linears"].op_counts.get(OP, 0) == linears
        ids = random_prompt(12)
        assert spec.check([ids, ids * 2], max_new_tokens=12)
