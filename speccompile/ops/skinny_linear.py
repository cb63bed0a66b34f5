"""A linear over few rows, as ONE op: a decode step has B * T of them, and its time is that of reading the weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speccompile.ops.define import define

_SCHEMA = "skinny_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor"

#: The dtypes that the CUDA kernel multiplies; float32 would be cut to 10 bits on the tensor cores.
SKINNY_DTYPES = (torch.bfloat16, torch.float16)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x`` ``[..., K]`` times ``weight`` ``[O, K]``, plus ``bias`` ``[O]``: ``[..., O]``, all of one dtype.

    On CUDA, up to 16 rows are multiplied by a kernel whose order of sums depends only on the weight's shape, so the
    bits of a row do not depend on the other rows. More rows are torch's product.
    """
    return F.linear(x, weight, bias)


def _fake(x, weight, bias=None):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


define(_SCHEMA, _fake, reference, key="CPU", cuda="skinny_linear.skinny_linear")
