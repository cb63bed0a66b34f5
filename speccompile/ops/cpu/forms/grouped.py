"""Integers of a quantised checkpoint, held exactly by the forms ``int4``, ``fp4`` and ``int8``."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.forms.base import COLUMNS, ceil_to, whole_columns
from speccompile.ops.cpu.forms.int4 import GROUP as PART
from speccompile.ops.cpu.forms.int4 import OFFSET, pack_nibbles
from speccompile.ops.cpu.forms.int8 import GROUP as INPUT_GROUP
from speccompile.ops.cpu.forms.int8 import pack_bytes
from speccompile.ops.cpu.forms.scales import pack_scales, pack_steps
from speccompile.quantized.weight import GroupedWeight
from speccompile.utils.fp4 import encode, is_fp4

#: Inputs whose scales share a float16, in K-quants.
STEPS_OF = 256


def pack_grouped(weight: GroupedWeight) -> tuple[Form, tuple[torch.Tensor, ...]]:
    """The form that holds ``weight`` in the order of its values, and the tensors that stand for it.

    Four bits are held in ``int4``, except in groups of 16, and except with both a sign and minimums: its ops do not
    have these. Numbers of MXFP4 and NVFP4, six bits as integers, are held in ``fp4``. Scales have the first of three
    kinds that holds all of them exactly. Without minimums: float16. In groups of 16 and 32: integers of eight bits
    times a shared float16, as in llama.cpp's K-quants. Otherwise: float32.
    """
    inputs = weight.shape[-1]
    if weight.experts is not None:
        weight = _in_whole_blocks(weight)
    values, minimums = weight.values, weight.minimums
    unsigned = bool(values.min() >= 0)
    fits = weight.group % PART == 0 or weight.group == inputs
    # Without a sign and minimums, values up to 7 have both forms.
    name = "int8"
    if weight.bits == 4 and fits and (minimums is None or unsigned):
        name = "int4"
    elif weight.bits == 6 and minimums is None and is_fp4(values):
        name = "fp4"
    form = FORMS[name]
    if name == "int4" and minimums is None and bool(values.max() >= OFFSET):
        minimums = torch.zeros_like(weight.scales)
    numbers = F.pad(whole_columns(values), (0, -inputs % INPUT_GROUP))
    # Runs of inputs that end with the last one, or the group of all of them with what is added to these.
    missing = 0 if weight.group == inputs else ceil_to(inputs, INPUT_GROUP) // weight.group - weight.scales.shape[1]
    scales, below = (
        None if given is None else F.pad(whole_columns(given), (0, missing)) for given in (weight.scales, minimums)
    )
    assert scales is not None
    halves = scales.half()
    units = None
    if below is None and torch.equal(halves.float(), scales):
        scales = halves
    elif weight.group < INPUT_GROUP:
        units = pack_steps(scales, below, STEPS_OF // weight.group)
    if name == "fp4":
        packed = pack_nibbles(encode(numbers))
    elif name == "int4":
        packed = pack_nibbles(numbers if below is not None else numbers + OFFSET)
    else:
        packed = pack_bytes(numbers)
    return form, (packed, pack_scales(scales, below) if units is None else units)


def _in_whole_blocks(weight: GroupedWeight) -> GroupedWeight:
    """Experts with zeros after the outputs of each, up to a multiple of a block."""

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        matrices = tensor.unflatten(0, (weight.experts, -1))
        missing = -matrices.shape[1] % COLUMNS
        return F.pad(matrices, (0, 0, 0, missing)).flatten(0, 1) if missing else tensor

    minimums = None if weight.minimums is None else padded(weight.minimums)
    return replace(weight, values=padded(weight.values), scales=padded(weight.scales), minimums=minimums)
