"""A linear whose weights are those of the experts that a router chose for each token.

``native_`` is the C++ form (``ops/cpu/csrc/experts/expert_linear.cpp``). Activations, gates and the router's weights of
the experts stay ordinary ops between two such linears and after them. Source: ``batched_mm_experts_forward`` of
transformers (``integrations/moe.py``), without its copies of weights.
"""

from __future__ import annotations

import torch

from speccompile.ops.define import define

_SCHEMA = "(Tensor x, Tensor experts, Tensor weight, Tensor? bias, bool transposed) -> Tensor"


def reference(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """``y[p, j] = weight[experts[p, j]] @ x[p, j] + bias[experts[p, j]]``.

    Each pair of a token and an expert is a separate product: its bits do not depend on the other pairs.

    Args:
        x: ``[P, K]``, what all k experts of a token read, or ``[P, k, K]``.
        experts: int64 ``[P, k]``, which of the E experts. One that is E or more has no weights: its result is zeros.
        weight: ``[E, F, K]``, ``[E, K, F]`` if ``transposed``; of the dtype of ``x``.
        bias: ``[E, F]``.

    Returns:
        ``[P, k, F]``, of the dtype of ``x``.

    Raises:
        RuntimeError: an expert is negative.
    """
    chosen = experts.flatten().tolist()
    if any(expert < 0 for expert in chosen):
        raise RuntimeError(f"speccompile::expert_linear: experts must be >= 0, got {min(chosen)}")
    inputs = (x if x.dim() == 3 else x[:, None].expand(*experts.shape, -1)).flatten(0, 1)
    results = x.new_zeros((len(chosen), weight.shape[2 if transposed else 1]))
    # By expert: its weights are then in a cache for all tokens but the first.
    for pair in sorted(range(len(chosen)), key=chosen.__getitem__):
        expert = chosen[pair]
        if expert < weight.shape[0]:
            matrix = weight[expert] if transposed else weight[expert].t()
            result = inputs[pair : pair + 1] @ matrix
            results[pair] = (result if bias is None else result + bias[expert])[0]
    return results.unflatten(0, experts.shape)


def _fake(x, experts, weight, bias, transposed):  # type: ignore[no-untyped-def]
    return x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]))


define(
    "expert_linear" + _SCHEMA, _fake, reference, native="experts", in_bodies=True, cuda="expert_linear.expert_linear"
)
