"""Random linears of experts, and choices of them."""

from __future__ import annotations

import torch

EXPERTS, CHOSEN = 4, 3

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, bool]


def case(
    tokens: int,
    *,
    own: bool,
    transposed: bool,
    biased: bool,
    depth: int = 65,
    features: int = 70,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Arguments of ``expert_linear``: few of the choices are of expert 2 or 3, and some of none that has weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x = normal(tokens, CHOSEN, depth) if own else normal(tokens, depth)
    sizes = (depth, features) if transposed else (features, depth)
    chances = torch.tensor([4.0, 4.0, 1.0, 1.0, 2.0])
    experts = torch.multinomial(chances, tokens * CHOSEN, replacement=True, generator=generator).view(tokens, CHOSEN)
    bias = normal(EXPERTS, features) if biased else None
    return x, experts, normal(EXPERTS, *sizes) / depth**0.5, bias, transposed
