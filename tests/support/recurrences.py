"""The recurrence ops over random texts: as arguments, and as a slot that is stepped through a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import speccompile.ops  # noqa: F401  defines the ops

OPS = torch.ops.speccompile
FORMS = ("", "native_")
#: The widest step.
WIDEST = 5


@dataclass(frozen=True)
class Problem:
    """One op over texts.

    Args:
        places: its inputs of each place, ``[B, L, ...]``, before ``fixed`` or around them: see ``order``.
        fixed: arguments that all places share.
        order: indices into ``(*places, *fixed)``, in the order of the op's arguments.
        state: shape of a slot's state; None for a convolution.
        kept: (places, numbers) of what is kept of a slot.
    """

    op: str
    places: tuple[torch.Tensor, ...]
    fixed: tuple[torch.Tensor | None, ...]
    order: tuple[int, ...]
    state: tuple[int, ...] | None
    kept: tuple[int, int]

    @property
    def length(self) -> int:
        return self.places[0].shape[1]


@dataclass
class Slots:
    """The state of ``count`` slots, at first of no text and full of numbers that must not be seen."""

    problem: Problem
    form: str
    count: int = 3
    state: torch.Tensor | None = field(init=False)
    kept: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.problem.state
        self.state = None if shape is None else torch.full((self.count, *shape), torch.nan)
        self.kept = torch.full((self.count, *self.problem.kept), torch.nan)

    def op(self) -> Callable[..., torch.Tensor]:
        found: Callable[..., torch.Tensor] = getattr(OPS, f"{self.form}{self.problem.op}_")
        return found

    def step(
        self,
        places: Sequence[torch.Tensor],
        slots: Sequence[int],
        first: Sequence[int],
        absorbed: Sequence[int],
        settled: Sequence[int],
    ) -> torch.Tensor:
        """The op over ``places`` ``[B, T, ...]`` that stand at ``first`` and the positions after it."""
        problem = self.problem
        given = (*places, *problem.fixed)
        positions = torch.tensor(first)[:, None] + torch.arange(places[0].shape[1])
        state = [] if self.state is None else [self.state]
        stands = [] if self.state is None else [torch.tensor(absorbed)]
        op = self.op()
        arguments = [given[index] for index in problem.order]
        result: torch.Tensor = op(
            *arguments, *state, self.kept, torch.tensor(slots), positions, *stands, torch.tensor(settled)
        )
        return result

    def of(self, slot: int, length: int) -> list[torch.Tensor]:
        """What the slot keeps of a text of which ``length`` tokens are settled."""
        if self.state is not None:
            return [self.state[slot].clone()]
        places, window = self.problem.kept[0], self.problem.kept[0] - WIDEST
        return [self.kept[slot, [p % places for p in range(max(0, length - window), length)]].clone()]


def causal_conv(length: int = 23, rows: int = 2, seed: int = 0, *, bias: bool = True) -> Problem:
    random = torch.Generator().manual_seed(seed)
    channels, window = 37, 4
    x = torch.randn(rows, length, channels, generator=random)
    weight = torch.randn(channels, window, generator=random)
    added = torch.randn(channels, generator=random) if bias else None
    return Problem("causal_conv", (x,), (weight, added), (0, 1, 2), None, (WIDEST + window - 1, channels))


def gated_delta_rule(length: int = 23, rows: int = 2, seed: int = 0, *, each_channel: bool = False) -> Problem:
    random = torch.Generator().manual_seed(seed)
    groups, heads, depth, wide = 2, 4, 5, 11
    gates = depth if each_channel else 1
    q, k = (
        torch.nn.functional.normalize(torch.randn(rows, length, groups, depth, generator=random), dim=-1) for _ in "qk"
    )
    v = torch.randn(rows, length, heads, wide, generator=random)
    gate = -torch.rand(rows, length, heads, gates, generator=random)
    beta = torch.rand(rows, length, heads, generator=random)
    kept = groups * depth + heads * (wide + gates + 1)
    return Problem("gated_delta_rule", (q, k, v, gate, beta), (), (0, 1, 2, 3, 4), (heads, depth, wide), (WIDEST, kept))


def selective_scan(length: int = 23, rows: int = 2, seed: int = 0, *, each_channel: bool = False) -> Problem:
    random = torch.Generator().manual_seed(seed)
    heads, groups, depth, size = (6, 1, 1, 9) if each_channel else (4, 2, 3, 9)
    x = torch.randn(rows, length, heads, depth, generator=random)
    dt = torch.rand(rows, length, heads, generator=random)
    b, c = (torch.randn(rows, length, groups, size, generator=random) for _ in "bc")
    decay = -torch.rand(heads, size if each_channel else 1, generator=random)
    kept = heads * (depth + 1) + groups * size
    return Problem("selective_scan", (x, dt, b, c), (decay,), (0, 1, 4, 2, 3), (heads, depth, size), (WIDEST, kept))


PROBLEMS = {
    "causal_conv": causal_conv,
    "causal_conv without bias": lambda **sizes: causal_conv(**sizes, bias=False),
    "gated_delta_rule": gated_delta_rule,
    "gated_delta_rule, a gate for each channel": lambda **sizes: gated_delta_rule(**sizes, each_channel=True),
    "selective_scan": selective_scan,
    "selective_scan, a decay for each place": lambda **sizes: selective_scan(**sizes, each_channel=True),
}
