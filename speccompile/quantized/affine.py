"""Integers with zero points, as all formats but GGUF's have them: ``w = scale * (value - zero)``."""

from __future__ import annotations

import torch

from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GROUPS, RANGES, GroupedWeight

#: A float32 number with no more significant bits than this is multiplied exactly with an integer of ten bits.
SIGNIFICANT_BITS = 12


def affine_weight(
    source: TensorSource,
    values: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    bits: int,
    group_of_input: torch.Tensor | None = None,
) -> GroupedWeight:
    """The weight ``scales * (values - zeros)`` whose ``dequantize()`` has the bits of that expression in float32.

    Args:
        values: int ``[N, K]``, of ``bits`` bits, with or without a sign.
        zeros: int ``[N, G]``; None means 0.
        scales: floating point ``[N, G]``, one for each group of ``K / G`` inputs.
        bits: 2 to 8, those of a value.
        group_of_input: int ``[K]``, the group of each input (act-order); None: groups are of successive inputs.

    Raises:
        UnsupportedCheckpoint: the group size is not one that kernels have, or it cannot be written as a
            :class:`GroupedWeight` with the same bits.
        DamagedCheckpoint: shapes do not fit one another, or a scale is not finite.
    """
    outputs, inputs = values.shape
    groups = scales.shape[1] if scales.dim() == 2 else 0
    if (
        scales.shape != (outputs, groups)
        or values.numel() == 0
        or groups == 0
        or (zeros is not None and zeros.shape != scales.shape)
    ):
        shapes = f"values {list(values.shape)}, scales {list(scales.shape)}"
        shapes += "" if zeros is None else f", zero points {list(zeros.shape)}"
        raise source.damaged(f"its shapes do not fit one another: {shapes}")
    if inputs % groups:
        raise source.unsupported(f"its {inputs} inputs do not divide into {groups} groups of one size")
    scales = scales.to(torch.float32)
    if not bool(scales.isfinite().all()):
        raise source.damaged("a scale is not a finite number")
    order = None if group_of_input is None else _order(source, group_of_input, inputs, groups)
    if order is not None:
        values = values[:, order]
    stored, minimums, bits = _without_zeros(source, values, zeros, scales, bits)
    group, repeats = _kernel_group(source, inputs // groups, inputs)
    return GroupedWeight(
        values=stored,
        bits=bits,
        scales=scales.repeat_interleave(repeats, 1).contiguous(),
        minimums=None if minimums is None else minimums.repeat_interleave(repeats, 1).contiguous(),
        group=group,
        order=order,
    )


def _kernel_group(source: TensorSource, group: int, inputs: int) -> tuple[int, int]:
    """The group size of kernels, and how many of those have one scale."""
    if group in GROUPS or group == inputs:
        return group, 1
    largest = max(GROUPS)
    if group % largest == 0:
        return largest, group // largest
    raise source.unsupported(f"its group size is {group}, and kernels have {', '.join(map(str, GROUPS))}")


def _without_zeros(
    source: TensorSource, values: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Values as int8, minimums or none, and bits as kernels have them: of the forms that are exact the smallest."""
    values = values.to(torch.int16)
    if zeros is None:
        return _int8(source, values, bits)
    zeros = zeros.to(torch.int16)
    first = int(zeros[0, 0])
    if bool((zeros == first).all()):
        # Symmetric formats: nothing is left to subtract.
        shifted = _kernel_bits(values - first, bits)
        if shifted is not None and shifted <= (_kernel_bits(values, bits) or shifted):
            return _int8(source, values - first, bits)
    if _exact(scales):
        # A product of a scale and an integer is exact, so subtracting two of them is, too.
        # Kernels of 4 bits that subtract minimums have values without a sign.
        offset = 128 if int(values.max()) > 127 else -8 if bits <= 4 and int(values.min()) < 0 else 0
        stored, _, bits = _int8(source, values - offset, bits)
        return stored, scales * (zeros - offset), bits
    # Each weight is rounded once, as the format says: subtract the integers before.
    group = values.shape[1] // zeros.shape[1]
    return _int8(source, (values.unflatten(1, (-1, group)) - zeros[..., None]).flatten(1), bits)


def _int8(source: TensorSource, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, None, int]:
    fitting = _kernel_bits(values, bits)
    if fitting is None:
        reason = "its zero points take its values out of 8 bits, and its scales of float32 are too precise to multiply"
        raise source.unsupported(f"{reason} them apart exactly")
    return values.to(torch.int8).contiguous(), None, fitting


def _kernel_bits(values: torch.Tensor, bits: int) -> int | None:
    """The fewest bits, from ``bits`` on, of a :class:`GroupedWeight` for these values; None if none is enough."""
    low, high = (int(end) for end in torch.aminmax(values))
    for kernel_bits, (least, most) in RANGES.items():
        fits = least <= low and high <= most and (kernel_bits != 4 or low >= 0 or high < 8)
        if bits <= kernel_bits and fits:
            return kernel_bits
    return None


def _exact(scales: torch.Tensor) -> bool:
    """Whether the scales have so few significant bits that their products with integers are exact (float16's have 11,
    bfloat16's 8)."""
    unused = (1 << (24 - SIGNIFICANT_BITS)) - 1
    return not bool((scales.contiguous().view(torch.int32) & unused).any())


def _order(source: TensorSource, group_of_input: torch.Tensor, inputs: int, groups: int) -> torch.Tensor | None:
    """The permutation that puts the inputs of each group beside one another; None where they are.

    Source: GPTQ's ``g_idx`` (AutoGPTQ, ``qlinear_cuda.py``).
    """
    if tuple(group_of_input.shape) != (inputs,):
        raise source.damaged(f"it has {inputs} inputs, and groups for {list(group_of_input.shape)}")
    of_input = group_of_input.to(torch.int64)
    if int(of_input.min()) < 0 or int(of_input.max()) >= groups:
        raise source.damaged(f"it has {groups} groups, and an input is in group {int(of_input.max())}")
    sizes = torch.bincount(of_input, minlength=groups)
    if not bool((sizes == inputs // groups).all()):
        reason = f"its act-order groups have {int(sizes.min())} to {int(sizes.max())} inputs, and kernels want one size"
        raise source.unsupported(reason)
    order = of_input.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order
