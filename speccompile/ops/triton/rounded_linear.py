"""Linears and embeddings over int8, int4 and fp4 weights on CUDA.

They read the packs that the CPU's kernels read, and compute the same model: inputs are rounded row by row, and the sum
of a part's products is one of integers. The order in which parts and groups are added depends on the weight's shape and
form, so a row has the same bits at every width, whatever the other rows are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.rounded_kernels import multiply_rounded, read_rounded_rows, round_inputs

#: Outputs of a packed block, and inputs that are rounded together.
COLUMNS, GROUP = 32, 64
#: Words of a group, of four inputs each.
WORDS = GROUP // 4
#: Linears of a launch: queries, keys and values.
LINEARS = 3
#: Values of an embedding that a program reads at once.
VALUES = 128
#: Rows of a tile, at most.
MOST_ROWS = 8


# Measured on an H200 with weights of Llama-3.1-8B, at 1 and 8 rows. The order of sums depends on the warps, so these do
# not depend on the outputs: linears have the same bits in one launch and in several.
_WARPS, _WARPS_OF_MANY_INPUTS, _MANY_INPUTS = 8, 16, 8192


def _sizes(packed: torch.Tensor, scales: torch.Tensor, coded: bool) -> dict[str, object]:
    """Facts of a pack, for both kernels: its sizes, and whether four bits are E2M1."""
    return {
        "GROUPS": packed.shape[1] // WORDS,
        "SCALE_ROWS": scales.shape[1],
        "MINIMUMS": scales.dim() == 4,
        "HALVES": _halves(packed),
        "CODED": coded,
        "COLUMNS": COLUMNS,
    }


def _halves(packed: torch.Tensor) -> int:
    """Outputs that a byte has numbers of."""
    return 2 if packed.dtype == torch.uint8 else 1


def round_launch(x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor) -> Launch:
    """``x`` ``[rows, depth]`` to int8 ``[rows, groups, 64]`` and float32 ``[rows, groups]``."""
    rows, groups, _ = numbers.shape
    arguments = {"x": x, "numbers": numbers, "scales": scales, "DEPTH": x.shape[1], "GROUPS": groups, "GROUP": GROUP}
    return Launch(round_inputs, (rows, groups), arguments, warps=1)


def multiply_launch(
    numbers: torch.Tensor,
    input_scales: torch.Tensor,
    packed: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out: Sequence[torch.Tensor],
    coded: bool = False,
) -> Launch:
    """One launch for at most three linears, whose packs differ only in ``features``; ``out[i]`` is ``[rows, F_i]``."""
    sizes = _sizes(packed[0], scales[0], coded)
    rows, groups, _ = numbers.shape
    halves = _halves(packed[0])
    blocks = [weight.shape[0] for weight in packed]
    # A warp reads four groups (int8) or eight (int4) at once, 512 bytes.
    at_once = 4 * halves
    most = _WARPS_OF_MANY_INPUTS if halves == 1 and groups * GROUP > _MANY_INPUTS else _WARPS
    warps = min(most, triton.next_power_of_2(-(-groups // at_once)))
    tile_rows = min(MOST_ROWS, triton.next_power_of_2(rows))
    arguments: dict[str, object] = {}
    for number in range(LINEARS):
        # No program has a linear that is not there.
        own = number if number < len(packed) else 0
        arguments |= {
            f"words_{number}": packed[own].view(torch.int32),
            f"scales_{number}": scales[own],
            f"bias_{number}": biases[own],
            f"out_{number}": out[own],
            f"features_{number}": out[own].shape[1],
        }
    arguments |= {
        "inputs": numbers.view(torch.int32),
        "input_scales": input_scales,
        "rows": rows,
        "blocks_0": blocks[0],
        "blocks_1": sum(blocks[1:2]),
        "PARTS": max(1, scales[0].shape[1] // groups),
        "TOGETHER": at_once * warps,
        "ROWS": tile_rows,
        "ASSEMBLY": not triton.knobs.runtime.interpret,
    }
    return Launch(multiply_rounded, (-(-rows // tile_rows), sum(blocks)), arguments | sizes, warps=warps)


def _shape_of(packed: torch.Tensor, scales: torch.Tensor) -> tuple[object, ...]:
    return packed.shape[1], packed.dtype, scales.shape[1:]


def runs_of(packed: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> list[slice]:
    """Linears that one launch multiplies: at most three that follow one another, with packs of the same sizes."""
    runs: list[slice] = []
    for number, sizes in enumerate(map(_shape_of, packed, scales)):
        last = runs[-1] if runs else None
        if last is None or number - last.start == LINEARS or _shape_of(packed[last.start], scales[last.start]) != sizes:
            runs.append(slice(number, number + 1))
        else:
            runs[-1] = slice(last.start, number + 1)
    return runs


def rounded_linears(
    x: torch.Tensor,
    packed: list[torch.Tensor],
    scales: list[torch.Tensor],
    biases: list[torch.Tensor],
    features: list[int],
    coded: bool = False,
) -> list[torch.Tensor]:
    """``int8_linears``, ``int4_linears`` and, if ``coded``, ``fp4_linears`` (:mod:`speccompile.ops.native`) on CUDA."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    rows, groups = flat.shape[0], packed[0].shape[1] // WORDS
    numbers = torch.empty((rows, groups, GROUP), dtype=torch.int8, device=x.device)
    input_scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    results = [x.new_empty((*x.shape[:-1], count)) for count in features]
    out = [result.view(rows, -1) for result in results]
    given: list[torch.Tensor | None] = [bias.contiguous() for bias in biases]
    given = given or [None] * len(features)
    launches = [round_launch(flat, numbers, input_scales)]
    for run in runs_of(packed, scales):
        launches.append(multiply_launch(numbers, input_scales, packed[run], scales[run], given[run], out[run], coded))
    run_all(launches, x)
    return results


def rounded_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    features: int,
    coded: bool = False,
) -> torch.Tensor:
    """``int8_linear``, ``int4_linear`` and, if ``coded``, ``fp4_linear`` on CUDA."""
    return rounded_linears(x, [packed], [scales], [] if bias is None else [bias], [features], coded)[0]


def embedding_launch(
    packed: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, coded: bool = False
) -> Launch:
    """``out`` float32 ``[ids, depth]``."""
    depth = out.shape[-1]
    arguments = {"packed": packed, "scales": scales, "ids": ids, "out": out, "DEPTH": depth, "VALUES": VALUES}
    return Launch(read_rounded_rows, (ids.numel(), -(-depth // VALUES)), arguments | _sizes(packed, scales, coded))


def rounded_embedding(
    packed: torch.Tensor, scales: torch.Tensor, ids: torch.Tensor, depth: int, coded: bool = False
) -> torch.Tensor:
    """``int8_embedding``, ``int4_embedding`` and, if ``coded``, ``fp4_embedding`` on CUDA.

    Ids are not checked: that would wait for the GPU.
    """
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, depth), dtype=torch.float32, device=packed.device)
    run_all([embedding_launch(packed, scales, ids, out, coded)], packed)
    return out
