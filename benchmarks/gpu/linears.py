"""Products of a layer and of the lm_head at few rows, by kernel: which share of the copy bandwidth they reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.steps import captured
from benchmarks.gpu.timing import interleaved

#: Weights that follow one another, so that none is in a cache.
_COPIES = 16

#: Multiplies ``x`` ``[rows, K]`` with the tensors of one weight.
Product = Callable[..., torch.Tensor]


def sizes_of(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product, separate and joined."""
    dim = shape.hidden // shape.heads
    keys = shape.kv_heads * dim
    return {
        "q": (shape.hidden, shape.hidden),
        "k": (shape.hidden, keys),
        "q, k, v joined": (shape.hidden, shape.hidden + 2 * keys),
        "gate": (shape.hidden, shape.intermediate),
        "gate, up joined": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
        "lm_head": (shape.hidden, shape.vocab),
    }


def measure_linears(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    figures: Figures,
    *,
    rows: tuple[int, ...],
    bandwidth: float,
    rounds: int,
) -> None:
    """Microseconds of each product in a row of them, one CUDA graph each."""
    figures["cases"] = cases = []
    for name, (inputs, outputs) in sizes_of(shape).items():
        copies = 2 if name == "lm_head" else _COPIES
        for kernel, product, weights in _kernels(inputs, outputs, copies, dtype, device):
            nbytes = sum(tensor.nbytes for tensor in weights[0])
            for count in rows:
                x = torch.randn(count, inputs, dtype=dtype, device=device)

                def work(
                    x: torch.Tensor = x,
                    product: Product = product,
                    weights: list[tuple[torch.Tensor, ...]] = weights,
                ) -> None:
                    for weight in weights:
                        product(x, *weight)

                run = captured(work, device) if device.type == "cuda" else work
                seconds = interleaved({name: run}, device, rounds)[name] / copies
                share = nbytes / seconds / bandwidth
                case = {"product": name, "kernel": kernel, "rows": count, "microseconds": 1e6 * seconds, "share": share}
                cases.append(case)


def _kernels(
    inputs: int, outputs: int, copies: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Product, list[tuple[torch.Tensor, ...]]]]:
    """Each kernel with random weights; those of the package on a GPU alone."""
    weights = torch.empty(copies, outputs, inputs, dtype=dtype, device=device).normal_()
    yield "torch", F.linear, [(weight,) for weight in weights.unbind()]
    if device.type != "cuda":
        return
    from speccompile.ops.triton.rounded_linear import rounded_linear
    from speccompile.ops.triton.skinny_linear import skinny_linear

    yield "few rows", skinny_linear, [(weight,) for weight in weights.unbind()]
    del weights

    def rounded(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rounded_linear(x, packed, scales, None, outputs)

    # As the forms int8 and int4 pack them: blocks of 32 outputs, scales for 64 inputs or 32.
    blocks, words, groups = -(-outputs // 32), -(-inputs // 64) * 16, -(-inputs // 64)
    for form, packed_dtype, lanes, scale_dtype, parts in (
        ("int8", torch.int8, 32, torch.float32, 1),
        ("int4", torch.uint8, 16, torch.float16, 2),
    ):
        packed = torch.randint(0, 127, (copies, blocks, words, lanes, 4), dtype=packed_dtype, device=device)
        scales = torch.rand(copies, blocks, groups * parts, 32, device=device).to(scale_dtype)
        yield form, rounded, list(zip(packed.unbind(), scales.unbind(), strict=True))
