"""The least time that a step can take: the bytes that it has to read, at the bandwidth of a copy on this device."""

from __future__ import annotations

import statistics

import torch

from benchmarks.gpu.timing import seconds_of
from speccompile import Speculator
from speccompile.lowering.tier import Tier


def copy_bandwidth(device: torch.device, nbytes: int, repeats: int = 20) -> float:
    """Bytes read and written a second by a copy on the device, larger than its caches; the median."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    taken = [seconds_of(lambda: target.copy_(source), device) for _ in range(repeats + 1)]
    return 2 * nbytes / statistics.median(taken[1:])


def weight_bytes(tier: Tier, embedding: torch.Tensor, head: torch.Tensor) -> int:
    """Of the tensors of the model that a step reads whole: an embedding that is not the lm_head too is not."""
    names = zip(tier.argument_names, tier.arguments, strict=True)
    weights = {tensor.data_ptr(): tensor for name, tensor in names if name not in tier.arena}
    if embedding.data_ptr() != head.data_ptr():
        weights.pop(embedding.data_ptr(), None)
    return sum(tensor.nbytes for tensor in weights.values())


def kv_bytes(spec: Speculator, rows: int, context: int) -> int:
    """Of the keys and values that steps of so many rows read, each row's text being of so many tokens."""
    caches = [spec.arena[name] for name, tensor in spec.arena.layout.tensors.items() if tensor.follows_text]
    return rows * context * sum(cache[0, 0].nbytes for cache in caches if cache.is_floating_point())
