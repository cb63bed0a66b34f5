"""Top-k and top-p on CUDA, where no step may wait for the host: ``speccompile.sampling`` defines the ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from speccompile.ops.on_cuda import register_on_cuda

_library = torch.library.Library("speccompile", "FRAGMENT")


def _on_cuda(
    scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, drafted: int, state: Sequence[torch.Tensor]
) -> None:
    from speccompile.ops.triton.threshold import mask_below_threshold

    mask_below_threshold(scores, state[0])


for _name in ("top_k_", "top_p_"):
    register_on_cuda(_library, _name, _on_cuda)
