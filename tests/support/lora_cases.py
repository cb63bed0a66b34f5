"""Random adapters of three linears, and what the op that adds them has to return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from speccompile.ops.lora import NONE, pack_down, pack_up

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Case:
    """Three linears of one input, and adapters for them."""

    x: torch.Tensor
    outputs: list[torch.Tensor]
    down: list[list[torch.Tensor]]
    up: list[list[torch.Tensor]]
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    ranks: torch.Tensor
    scales: torch.Tensor
    places: torch.Tensor

    def run(
        self, op: Callable[..., list[torch.Tensor]], rows: slice = slice(None), width: slice = slice(None)
    ) -> list[torch.Tensor]:
        """Over some rows and places. The linears are numbers 1 to 3 of their layer."""
        outputs = [output[rows, width] for output in self.outputs]
        return list(op(self.x[rows, width], outputs, self.a, self.b, self.ranks, self.scales, 1, self.places[rows]))

    def check(self, results: list[torch.Tensor]) -> None:
        """``results`` are those of the definition, in double precision."""
        dtype = self.x.dtype
        for i, (got, output) in enumerate(zip(results, self.outputs, strict=True)):
            assert got.dtype == dtype and got.shape == output.shape
            for row, place in enumerate(self.places.tolist()):
                wanted = output[row].double()
                if place != NONE and self.ranks[place, i + 1]:
                    a, b = self.down[i][place].double(), self.up[i][place].double()
                    wanted = wanted + self.x[row].double() @ a.t() @ b.t() * self.scales[place, i + 1].double()
                else:
                    assert torch.equal(got[row], output[row])
                limit = TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
                assert float((got[row].double() - wanted).abs().max()) <= limit


def case(
    rows: int,
    width: int,
    *,
    depth: int = 65,
    features: tuple[int, ...] = (33, 64, 100),
    most: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Four adapters, some of which leave linears out; the rows have them, or none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    adapters = 4
    ranks = torch.randint(1, most + 1, (adapters, 4), generator=generator)
    ranks *= torch.rand((adapters, 4), generator=generator) < 0.8
    down = [[normal(int(ranks[p, i + 1]), depth) / depth**0.5 for p in range(adapters)] for i in range(3)]
    up = [[normal(size, int(ranks[p, i + 1])) for p in range(adapters)] for i, size in enumerate(features)]
    return Case(
        normal(rows, width, depth),
        [normal(rows, width, size) for size in features],
        down,
        up,
        [torch.stack([pack_down(matrix, most) for matrix in of]) for of in down],
        [torch.stack([pack_up(matrix, most) for matrix in of]) for of in up],
        ranks,
        torch.rand((adapters, 4), generator=generator),
        torch.randint(NONE, adapters, (rows,), generator=generator),
    )
