"""Temperature, top-k, top-p and min-p as one op, without and with the draw, for steps whose rows use nothing else.

The kernels read the options from the arena without a copy. On CUDA they read the logits at most four times.
"""

from __future__ import annotations

import torch

from speccompile.ops import choose
from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.sampling.base import Processor
from speccompile.sampling.min_p import MinP
from speccompile.sampling.temperature import Temperature
from speccompile.sampling.top_k import TopK
from speccompile.sampling.top_p import TopP

#: In running order. Each has one state tensor, of its option's name.
FILTERS: tuple[Processor, ...] = (Temperature(), TopK(), TopP(), MinP())
#: Request options.
FILTER_OPTIONS = frozenset(option.name for processor in FILTERS for option in processor.options)

_GIVEN = "Tensor logits, Tensor slots, Tensor temperature"


def filter_logits(logits: torch.Tensor, slots: torch.Tensor, *options: torch.Tensor) -> torch.Tensor:
    """Reference of the op: scores float32 ``[B, T, V]`` of ``logits`` after all :data:`FILTERS`, in their order.

    Args:
        slots: int64 ``[B]``.
        options: the state ``[N]`` of the filters.
    """
    scores = logits.to(torch.float32, copy=True)
    for processor, state in zip(FILTERS, options, strict=True):
        processor.apply(scores, slots, slots, state[slots])
    return scores


def draw_filtered(
    logits: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    length: torch.Tensor,
    seed: torch.Tensor,
    depths: torch.Tensor | None = None,
    divided: bool = False,
) -> torch.Tensor:
    """Reference of the op: tokens int64 ``[B, T]``, drawn from the filtered ``logits`` ``[B, T, V]`` by the target's
    noise; -1 where no token can be chosen.

    Args:
        top_k, top_p, min_p: ``[N]``, or None: no row uses the option.
        length, seed: int64 ``[N]``.
        depths: int64 ``[B, T]``, the distance of each position from the end of the sequence; None is 0 .. T-1.
        divided: the logits were already divided by the temperature.
    """
    scores = logits.to(torch.float32, copy=True)
    options = (None if divided else temperature, top_k, top_p, min_p)
    for processor, state in zip(FILTERS, options, strict=True):
        if state is not None:
            processor.apply(scores, slots, slots, state[slots])
    after = torch.arange(logits.shape[1], device=logits.device) if depths is None else depths
    positions = length[slots][:, None] + after
    return choose.reference(scores, temperature[slots], seed[slots], positions, forbids=True)


def _filter_on_cuda(logits, slots, temperature, top_k, top_p, min_p):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton import draw

    return draw.filter_logits(logits, draw.Filters(slots, temperature, top_k, top_p, min_p))


def _draw_on_cuda(logits, slots, temperature, top_k, top_p, min_p, length, seed, depths=None, divided=False):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton import draw

    if divided or top_k is None or top_p is None or min_p is None:
        raise ValueError("draw_filtered on CUDA needs logits and all options; call speccompile::choose")
    return draw.draw(logits, draw.Filters(slots, temperature, top_k, top_p, min_p), length, depths, seed)


def _fake_filter(logits, *rest):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _fake_draw(logits, *rest):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape[:2], dtype=torch.int64)


define(
    f"filter_logits({_GIVEN}, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    _fake_filter,
    filter_logits,
    cpp=BASE,
    recorded=True,
    cuda=_filter_on_cuda,
)
define(
    f"draw_filtered({_GIVEN}, Tensor? top_k, Tensor? top_p, Tensor? min_p, Tensor length, Tensor seed, "
    "Tensor? depths=None, bool divided=False) -> Tensor",
    _fake_draw,
    draw_filtered,
    cpp=BASE,
    recorded=True,
    cuda=_draw_on_cuda,
)
