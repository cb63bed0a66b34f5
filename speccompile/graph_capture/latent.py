"""Attention over the latents that multi-head latent attention (MLA) caches, without expanding them.

transformers' modules cache one latent and one rotary key of each token, and expand both into keys and values of all
heads before they attend (``expand_kv``). The expansion is linear. A score is therefore a product of the latents and of
the query times the expansion's matrix. The output is attention over the latents times the matrix of the values. This is
the absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1.2). A step then only reads the live latents.
"""

from __future__ import annotations

import torch
from torch import nn


def expands_latents(module: nn.Module) -> bool:
    """Whether ``module`` expands what it has cached, as transformers' MLA does."""
    return callable(getattr(module, "expand_kv", None))


def cached_latents(latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys ``[B, 1, T, R + P]`` and values ``[B, 1, T, R]`` for latents ``[B, 1, T, R]`` and rotary keys
    ``[B, 1, T, P]``."""
    return torch.cat([latent, rotary], dim=-1), latent


def expansion(
    module: nn.Module, rank: int, keys: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices of ``module.expand_kv``: its results for unit vectors.

    Args:
        rank: R, the size of a latent.
        keys: the cached ones, ``[..., R + P]``. The matrices are on their device.
        dtype: of the matrices.

    Returns:
        The matrix of the keys ``[H, R + P, D]``, and of the values ``[H, R, Dv]``.
    """
    # torch.eye is not used, since it would write a device into the captured graph.
    units = torch.diag_embed(keys.new_ones(keys.shape[-1], dtype=dtype))[None, None]
    of_keys, of_values = module.expand_kv(units[..., :rank], units[..., rank:])  # type: ignore[operator]
    return of_keys[0], of_values[0, :, :rank]
