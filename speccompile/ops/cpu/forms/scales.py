"""Scales of packed weights, as the ops of the rounded forms read them. Layout: ``csrc/rounded/rounded.h``."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.forms.base import COLUMNS

#: Bytes of the float16 that scales in steps share, of a block.
_UNITS = 2 * COLUMNS
#: Numbers of steps that the greatest scale may have: first those of llama.cpp, in Q4_K and Q6_K.
_COUNTS = (63, -128, 127, *range(62, 0, -1), *range(126, 63, -1))
#: Rows that are tried before all of them.
_TRIAL = 32


def pack_scales(scales: torch.Tensor, minimums: torch.Tensor | None = None) -> torch.Tensor:
    """Scales ``[N, R]``, N a multiple of 32, to ``[N / 32, R, 32]``; with minimums to ``[N / 32, R, 2, 32]``."""
    rows = _by_block(scales)
    return (rows if minimums is None else torch.stack((rows, _by_block(minimums)), 2)).contiguous()


def pack_steps(scales: torch.Tensor, minimums: torch.Tensor | None, shared_by: int) -> torch.Tensor | None:
    """Pack scales as integers of eight bits times one float16 for each ``shared_by`` scales of a row; minimums alike.

    Returns:
        uint8 ``[N / 32, R / shared_by, 64 + 32 * shared_by]``, with minimums ``[..., 2, ...]``. None if the scales or
        the minimums are not exactly such products.
    """
    if scales.shape[1] % shared_by:
        return None
    planes = []
    for values in (scales,) if minimums is None else (scales, minimums):
        found = _steps_of(values, shared_by)
        if found is None:
            return None
        units, counts = found
        lines = counts.unflatten(0, (-1, COLUMNS)).permute(0, 2, 3, 1).flatten(2).contiguous()
        planes.append(torch.cat((_by_block(units).contiguous().view(torch.uint8), lines.view(torch.uint8)), -1))
    return planes[0] if minimums is None else torch.stack(planes, 2)


def has_minimums(packed: torch.Tensor) -> bool:
    return packed.dim() == 4


def scaled(numbers: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """``scale * number - minimum``, float32 ``[N, K]``, of numbers ``[N, K]`` and what :func:`pack_scales` or
    :func:`pack_steps` returned."""
    scales, minimums = packed.unbind(2) if has_minimums(packed) else (packed, None)
    by_output = _by_output(scales)
    groups = numbers.unflatten(1, (by_output.shape[1], -1)) * by_output[..., None]
    return (groups if minimums is None else groups - _by_output(minimums)[..., None]).flatten(1)


def _by_block(values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(0, (-1, COLUMNS)).transpose(1, 2)


def _by_output(blocks: torch.Tensor) -> torch.Tensor:
    """Float32 ``[N, R]``."""
    if blocks.dtype == torch.uint8:
        units = blocks[..., :_UNITS].contiguous().view(torch.float16).float()
        counts = blocks[..., _UNITS:].contiguous().view(torch.int8).unflatten(-1, (-1, COLUMNS))
        blocks = (counts * units[:, :, None]).flatten(1, 2)
    return blocks.float().transpose(1, 2).flatten(0, 1)


def _steps_of(values: torch.Tensor, shared_by: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Float16 ``[N, G]`` and int8 ``[N, G, shared_by]`` whose products are ``values`` ``[N, R]``, exactly."""
    groups = values.unflatten(1, (-1, shared_by))
    if len(values) > _TRIAL and _steps_of(values[:_TRIAL], shared_by) is None:
        return None
    flat = groups.flatten(0, 1)
    most = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    units, counts = torch.zeros_like(most, dtype=torch.float16), torch.zeros_like(flat, dtype=torch.int8)
    left = most.nonzero()[:, 0]
    for count in _COUNTS:
        if not len(left):
            break
        unit = (most[left] / count).half()
        number = (flat[left] / unit.float()[:, None]).round().nan_to_num(0, 0, 0).clamp(-128, 127)
        fits = (number * unit.float()[:, None] == flat[left]).all(1)
        units[left[fits]], counts[left[fits]] = unit[fits], number[fits].to(torch.int8)
        left = left[~fits]
    if len(left):
        return None
    return units.unflatten(0, groups.shape[:2]), counts.unflatten(0, groups.shape[:2])
