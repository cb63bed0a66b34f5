"""The likeliest tokens and the entropy of a step, on the host."""

from __future__ import annotations

import numpy as np
import torch

from speccompile.runtime.token_trace import likeliest_on_host


def test_they_are_those_of_torch() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)) * 4
    logits[1, 7:] = -torch.inf
    ids, values, entropy = likeliest_on_host(logits.numpy(), 4)
    logprobs = logits.log_softmax(-1)
    expected = logprobs.topk(4)
    assert np.array_equal(ids, expected.indices) and np.allclose(values, expected.values, atol=1e-5)
    assert np.allclose(entropy, torch.special.entr(logprobs.exp()).sum(-1), atol=1e-5)


def test_without_places_nothing_is_returned() -> None:
    ids, values, entropy = likeliest_on_host(np.zeros((0, 9), np.float32), 2)
    assert ids.shape == values.shape == (0, 2) and entropy.shape == (0,)
