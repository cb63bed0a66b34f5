"""Low-rank adapters on linears: one op for all linears that read one input, and an adapter for each row.

``native_`` is the C++ form (``ops/cpu/csrc/lora/lora.cpp``); on CUDA the op is ``ops/triton/lora.py``. Sources: Hu et
al., "LoRA" (2021), section 4.1; rows of several adapters in one call: Chen et al., "Punica" (2023), section 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speccompile.ops.define import define

#: Ranks that a buffer has a multiple of: what a row of ``a`` is read by.
RANKS = 16
#: Outputs that lie side by side in ``b``, as in packed weights.
COLUMNS = 32
#: The largest rank that the kernel on CUDA has shared memory for.
MOST_ON_CUDA = 256
#: The place of a row without an adapter.
NONE = -1

SCHEMA = (
    "(Tensor x, Tensor[] outputs, Tensor[] a, Tensor[] b, Tensor ranks, Tensor scales, int first, Tensor places) "
    "-> Tensor[]"
)


def reference(
    x: torch.Tensor,
    outputs: list[torch.Tensor],
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    ranks: torch.Tensor,
    scales: torch.Tensor,
    first: int,
    places: torch.Tensor,
) -> list[torch.Tensor]:
    """``outputs[i] + scale * (x @ a.T) @ b.T`` with the matrices of each row's adapter, in float32. A row without an
    adapter, or whose adapter leaves linear ``i`` out, has ``outputs[i]`` as it is: nothing is added to it.

    Args:
        x: ``[B, T, K]`` or ``[B * T, K]``, what the linears read.
        outputs: ``[B, T, F_i]`` or ``[B * T, F_i]``, what linear i computed.
        a: ``[P, K, R]``, the first matrix of P adapters, transposed; R is a multiple of 16.
        b: ``[P, ceil(F_i / 32), R, 32]``, the second one: 32 outputs side by side. Ranks after an adapter's own are
            zeros, in both.
        ranks: int64 ``[P, L]``, the rank of each adapter in the L linears of a layer; 0 leaves a linear out.
        scales: float32 ``[P, L]``.
        first: the number among the L of linear 0; the others follow.
        places: int64 ``[B]``, which of the P adapters each row has, -1 for none.

    Returns:
        One tensor for each of ``outputs``, of its shape and dtype.
    """
    rows, at = places.shape[0], places.clamp(min=0)
    inputs = x.reshape(rows, -1, x.shape[-1]).float()
    results = []
    for number, (output, down, up) in enumerate(zip(outputs, a, b, strict=True)):
        old = output.reshape(rows, -1, output.shape[-1])
        up_of_row = up[at].transpose(1, 2).flatten(2)[..., : old.shape[-1]].float()
        added = inputs @ down[at].float() @ up_of_row * scales[at, first + number][:, None, None]
        adapted = (places >= 0) & (ranks[at, first + number] > 0)
        new = torch.where(adapted[:, None, None], (old.float() + added).to(old.dtype), old)
        results.append(new.reshape(output.shape))
    return results


def pack_down(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """``lora_A`` ``[r, K]`` as a buffer of ``rank`` ranks holds it: ``[K, rank]``."""
    return F.pad(matrix, (0, 0, 0, rank - matrix.shape[0])).t().contiguous()


def pack_up(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """``lora_B`` ``[F, r]`` as a buffer of ``rank`` ranks holds it: ``[ceil(F / 32), rank, 32]``."""
    padded = F.pad(matrix, (0, rank - matrix.shape[1], 0, -matrix.shape[0] % COLUMNS))
    return padded.unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()


def _fake(x, outputs, *rest):  # type: ignore[no-untyped-def]
    return [output.new_empty(output.shape) for output in outputs]


define("lora" + SCHEMA, _fake, reference, native="lora", in_bodies=True, cuda="lora.lora")
