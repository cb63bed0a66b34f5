"""Temperature, top-k, top-p and min-p on a GPU keep the tokens of their definition, and the best of them is drawn."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops.noise import add_gumbel
from speccompile.sampling import filters as definition
from support.gpu import on_gpu

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
def test_filtered_draws(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows, width = 4, 8
    logits = (3 * torch.randn(rows, width, vocab, generator=generator)).to(dtype)
    slots = torch.tensor([4, 0, 2, 1])
    options = (
        torch.tensor([0.0, 0.7, 1.0, 0.0, 1.3]),
        torch.tensor([0, 1, 50, 0, 200]),
        torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5]),
        torch.tensor([0.0, 0.05, 0.0, 0.0, 0.01]),
    )
    length, seed = torch.arange(5) * 100 + 7, torch.arange(5) + 3
    given = on_gpu(logits, slots, *options)
    wanted, kept = definition.filter_logits(logits, slots, *options), ops.filter_logits(*given).cpu()
    # Where a mass or a score is at the border but for rounding, one token more or less may stay.
    assert ((kept.isfinite().sum(-1) - wanted.isfinite().sum(-1)).abs() <= 1).all()
    both = kept.isfinite() & wanted.isfinite()
    torch.testing.assert_close(kept[both], wanted[both], rtol=1e-6, atol=1e-6)
    tokens = ops.draw_filtered(*given, *on_gpu(length, seed)).cpu()
    positions = length[slots][:, None] + torch.arange(width)
    noisy = kept.clone()
    add_gumbel(noisy, options[0][slots], seed[slots], positions, 0, None)
    chosen = noisy.gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(chosen, noisy.amax(-1), rtol=2e-6, atol=2e-6)
    # Rows of one seed draw the same tokens alone.
    alone = ops.draw_filtered(*on_gpu(logits[2:3], slots[2:3], *options, length, seed)).cpu()
    assert torch.equal(alone[0], tokens[2])
