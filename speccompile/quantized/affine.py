"""Integers with zero points, ``w = scale * (value - zero)``, the form of all formats but GGUF's."""

from __future__ import annotations

import torch

from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GROUPS, RANGES, GroupedWeight

#: The product of a float32 number with at most this many significant bits and an integer of ten bits is exact.
SIGNIFICANT_BITS = 12


def affine_weight(
    source: TensorSource,
    values: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    bits: int,
    group_of_input: torch.Tensor | None = None,
) -> GroupedWeight:
    """Return the weight ``scales * (values - zeros)``. Its ``dequantize()`` has the bits of that float32 expression.

    Args:
        values: int ``[N, K]``, of ``bits`` bits, with or without a sign.
        zeros: int ``[N, G]``; None means 0.
        scales: floating point ``[N, G]``, one for each group of ``K / G`` inputs.
        bits: bits of a value, 2 to 8.
        group_of_input: int ``[K]``, the group of each input (act-order). None means groups of successive inputs.

    Raises:
        UnsupportedCheckpoint: kernels do not have the group size, or no :class:`GroupedWeight` has the same bits.
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
    """Return the group size of kernels, and how many such groups share one scale."""
    if group in GROUPS or group == inputs:
        return group, 1
    largest = max(GROUPS)
    if group % largest == 0:
        return largest, group // largest
    raise source.unsupported(f"its group size is {group}, and kernels only have {', '.join(map(str, GROUPS))}")


def _without_zeros(
    source: TensorSource, values: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return values as int8, minimums or None, and the bits of a kernel: the smallest form that is exact."""
    values = values.to(torch.int16)
    if zeros is None:
        return _int8(source, values, bits)
    zeros = zeros.to(torch.int16)
    first = int(zeros[0, 0])
    if bool((zeros == first).all()):
        # In symmetric formats no minimum is left to subtract.
        shifted = _kernel_bits(values - first, bits)
        if shifted is not None and shifted <= (_kernel_bits(values, bits) or shifted):
            return _int8(source, values - first, bits)
    if _exact(scales):
        # The product of a scale and an integer is exact, so the difference of two products is exact, too.
        # 4-bit kernels that subtract minimums have values without a sign.
        offset = 128 if int(values.max()) > 127 else -8 if bits <= 4 and int(values.min()) < 0 else 0
        stored, _, bits = _int8(source, values - offset, bits)
        return stored, scales * (zeros - offset), bits
        # The format rounds each weight once, so the integers are subtracted first.
    group = values.shape[1] // zeros.shape[1]
    return _int8(source, (values.unflatten(1, (-1, group)) - zeros[..., None]).flatten(1), bits)


def _int8(source: TensorSource, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, None, int]:
    fitting = _kernel_bits(values, bits)
    if fitting is None:
        reason = "its zero points need values of more than 8 bits, and its float32 scales are too precise to multiply"
        raise source.unsupported(f"{reason} values and zero points separately and exactly")
    return values.to(torch.int8).contiguous(), None, fitting


def _kernel_bits(values: torch.Tensor, bits: int) -> int | None:
    """The fewest bits of a :class:`GroupedWeight`, from ``bits`` on, that hold these values; None if too few exist."""
    low, high = (int(end) for end in torch.aminmax(values))
    for kernel_bits, (least, most) in RANGES.items():
        fits = least <= low and high <= most and (kernel_bits != 4 or low >= 0 or high < 8)
        if bits <= kernel_bits and fits:
            return kernel_bits
    return None


def _exact(scales: torch.Tensor) -> bool:
    """Whether the scales have so few significant bits that their products with integers are exact. Scales in float16
    have 11, those in bfloat16 have 8."""
    unused = (1 << (24 - SIGNIFICANT_BITS)) - 1
    return not bool((scales.contiguous().view(torch.int32) & unused).any())


def _order(source: TensorSource, group_of_input: torch.Tensor, inputs: int, groups: int) -> torch.Tensor | None:
    """Return the permutation that puts the inputs of each group side by side; None if they are in that order.

    Source: GPTQ's ``g_idx`` (AutoGPTQ, ``qlinear_cuda.py``).
    """
    if tuple(group_of_input.shape) != (inputs,):
        raise source.damaged(f"it has {inputs} inputs, and groups for {list(group_of_input.shape)}")
    of_input = group_of_input.to(torch.int64)
    if int(of_input.min()) < 0 or int(of_input.max()) >= groups:
        raise source.damaged(f"it has {groups} groups, and an input is in group {int(of_input.max())}")
    sizes = torch.bincount(of_input, minlength=groups)
    if not bool((sizes == inputs // groups).all()):
        reason = f"its act-order groups have {int(sizes.min())} to {int(sizes.max())} inputs, and kernels need one size"
        raise source.unsupported(reason)
    order = of_input.argsort(stable=True)
    return None if torch.equal(order, torch.arange(inputs)) else order
