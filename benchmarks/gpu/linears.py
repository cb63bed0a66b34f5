"""Products of a layer and of the lm_head by cuBLAS: which share of the copy bandwidth they reach at few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.steps import captured
from benchmarks.gpu.timing import interleaved

#: Weights that follow one another, so that none is in a cache.
_COPIES = 16


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
        weights = torch.empty(copies, outputs, inputs, dtype=dtype, device=device).normal_()
        for count in rows:
            x = torch.randn(count, inputs, dtype=dtype, device=device)

            def work(x: torch.Tensor = x, weights: torch.Tensor = weights) -> None:
                for weight in weights.unbind():
                    F.linear(x, weight)

            run = captured(work, device) if device.type == "cuda" else work
            seconds = interleaved({name: run}, device, rounds)[name] / copies
            share = weights[0].nbytes / seconds / bandwidth
            cases.append({"product": name, "rows": count, "microseconds": 1e6 * seconds, "share": share})
