"""The model's own forward with an adapter, as the reference of the capture checks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from speccompile.adapters.buffers import OF_SLOT, AdapterBuffers, LoraPair, LoraPairs, write_adapter
from speccompile.graph.arena import Arena
from speccompile.graph_capture.altering import altering
from speccompile.ops.cpu.quantized import values_of
from speccompile.ops.lora import NONE

#: The scale of the trial adapter: the size of its addition to a linear, relative to the linear's own output.
TRIAL = 0.5


@contextlib.contextmanager
def adapted(model: nn.Module, pairs: LoraPairs) -> Iterator[None]:
    """In this context, hooks on the linears of ``model`` add the adapter ``pairs``."""
    with altering(model):
        handles = [
            model.get_submodule(path).register_forward_hook(partial(_with_pair, pair)) for path, pair in pairs.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _with_pair(pair: LoraPair, _module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    added = inputs[0].float() @ pair.a.t().float() @ pair.b.t().float() * pair.scale
    return (output.float() + added).to(output.dtype)


@contextlib.contextmanager
def trial_adapter(buffers: AdapterBuffers, arena: Arena, model: nn.Module) -> Iterator[dict[str, LoraPair]]:
    """In this context every slot has an adapter of random weights. The context yields that adapter. No other adapter
    may be loaded."""
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for linear in buffers.linears:
        weight = model.get_submodule(linear.path).weight
        assert isinstance(weight, torch.Tensor)
        size = float(values_of(weight).float().square().mean().sqrt())
        a = torch.randn((buffers.max_rank, linear.depth), generator=generator) / buffers.max_rank**0.5
        b = torch.randn((linear.features, buffers.max_rank), generator=generator) * size
        pairs[linear.path] = LoraPair(a, b, TRIAL)
    write_adapter(arena, 0, buffers.packed(pairs))
    arena[OF_SLOT].fill_(0)
    try:
        # Read back from the buffers: rounded to their dtype.
        yield buffers.pairs_at(arena, 0)
    finally:
        arena[OF_SLOT].fill_(NONE)
        for linear in buffers.linears:
            for name in (linear.a, linear.b, linear.ranks):
                arena[name][0].zero_()
