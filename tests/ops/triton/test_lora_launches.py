"""What adapters add to a layer on CUDA is one launch for each input that linears read, which compiles for sm_90."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.without_gpu.compiled import MOST_SHARED, compile_launch
from speccompile.ops.triton.launch import Launch, launches_of
from speccompile.ops.triton.lora import lora

#: Of a layer of Llama-3.1-8B: inputs, and outputs of the linears that read them.
GROUPS = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]


def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(
    depth: int,
    features: tuple[int, ...],
    *,
    rank: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    of_adapters: torch.dtype | None = None,
    rows: int = 1,
    width: int = 8,
) -> list[Launch]:
    outputs = [meta(rows, width, count, dtype=dtype) for count in features]
    a = [meta(4, depth, rank, dtype=of_adapters or dtype) for _ in features]
    b = [meta(4, -(-count // 32), rank, 32, dtype=of_adapters or dtype) for count in features]
    x, scales = meta(rows, width, depth, dtype=dtype), meta(4, 7, dtype=torch.float32)
    return launches_of(lambda: lora(x, outputs, a, b, meta(4, 7), scales, 0, meta(rows)))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 8), (32, 8), (1, 512)])
def test_a_layer_has_four_launches_more(rows: int, width: int) -> None:
    assert sum(len(launches(*group, rows=rows, width=width)) for group in GROUPS) == 4


def test_linears_beyond_the_third_have_another_launch() -> None:
    assert len(launches(64, (64,) * 4)) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [16, 32, 48, 64, 128, 256])
def test_it_compiles_without_spills(
    rank: int, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    (launch,) = launches(*GROUPS[0], rank=rank, dtype=dtype)
    compiled = compile_launch(launch)
    record_property(
        "kernel",
        f"{compiled.name} {str(dtype)[6:]} rank {rank}: {compiled.registers} registers, {compiled.stack} bytes of "
        f"stack a thread, {compiled.shared} bytes of shared memory",
    )
    assert compiled.stack == 0 and compiled.shared <= MOST_SHARED
    # The first matrix goes to the tensor cores where it is exact there, and is read 16 bytes at a time, ahead.
    assert ("mma" in compiled.ptx) == (dtype.itemsize == 2)
    assert "cp.async.cg" in compiled.ptx


def test_widths_share_one_machine_code() -> None:
    codes = [
        compile_launch(*launches(*GROUPS[0], rows=rows, width=width)).ptx for rows, width in ((1, 8), (3, 5), (2, 30))
    ]
    assert all(code == codes[0] for code in codes)


def test_matrices_in_another_dtype_than_the_model_are_multiplied_in_float32() -> None:
    (launch,) = launches(*GROUPS[0], rank=256, of_adapters=torch.float32)
    compiled = compile_launch(launch)
    assert compiled.shared <= MOST_SHARED and "mma" not in compiled.ptx
