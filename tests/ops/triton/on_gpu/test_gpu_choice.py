"""The choice of tokens, top-k, top-p and the test of a draft's rank on a GPU."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops import within_top as within_op
from speccompile.ops.noise import add_gumbel
from support.gpu import on_gpu

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
def test_choice_of_tokens(drawn: bool, vocab: int) -> None:
    from speccompile.ops.triton.choose import choose  # triton is imported on a GPU only

    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(4, 8, vocab, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.5] = float("-inf")
    noise = (torch.tensor([0.0, 1.0, 0.5, 2.0]), torch.arange(4) + 7, torch.arange(32).view(4, 8), 0, None)
    noisy = scores.clone()
    if drawn:
        add_gumbel(noisy, *noise)
    arguments = [item.cuda() if isinstance(item, torch.Tensor) else item for item in noise] if drawn else []
    got = choose(scores.cuda(), *arguments, forbids=drawn).cpu()
    # Logarithms differ in their last bits: what was chosen is as good as the best one.
    chosen = noisy.gather(-1, got[..., None])[..., 0]
    torch.testing.assert_close(chosen, noisy.amax(-1), rtol=2e-6, atol=2e-6)
    if not drawn:
        assert torch.equal(got, noisy.argmax(-1))


@pytest.mark.parametrize("vocab", [1000, 49152, 128256])
def test_top_k_and_top_p_wait_for_nobody(vocab: int) -> None:
    """The ops that graphs call, on both devices; on CUDA under capture."""
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(3, 8, vocab, generator=generator) * 4
    nothing = torch.zeros(3, 1, dtype=torch.int64)
    for name, wanted in (("top_k_", torch.tensor([0, 1, 50])), ("top_p_", torch.tensor([0.3, 1.0, 0.95]))):
        op = getattr(ops, name)
        expected, got = scores.clone(), scores.cuda()
        op(expected, nothing, nothing[:, 0], 0, [wanted])
        inputs = (got, *on_gpu(nothing, nothing[:, 0]), 0, [wanted.cuda()])
        op(*inputs)
        got.copy_(scores)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(*inputs)
        graph.replay()
        kept, wished = (found.isfinite().sum(-1) for found in (got.cpu(), expected))
        # Where the mass is at the border but for rounding, one more or one less may stay.
        assert (kept - wished).abs().max() <= (name == "top_p_") and (got.cpu()[:, :, 0] <= scores[:, :, 0]).all()


def test_drafts_within_the_top() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = 3 * torch.randn(4, 8, 128256, generator=generator)
    # The last few of the most likely, and places that are not ids.
    drafts = torch.cat([scores[:, :6].topk(6, -1).indices[..., -1], torch.tensor([[-1]] * 4)], dim=1)
    allowed = torch.tensor([-1.0, 1e-4, 0.013, 1.0])
    wanted = within_op.reference(scores, drafts, allowed, 6)
    assert torch.equal(ops.is_within_top(*on_gpu(scores, drafts, allowed), 6).cpu(), wanted)
    assert 0 < wanted.sum() < wanted.numel() and not wanted[0].any()
