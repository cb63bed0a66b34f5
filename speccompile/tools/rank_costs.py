"""Model of the cost of a step of a sharded model over n ranks, and of the draft length up to which speculation pays.

``python -m speccompile.tools.rank_costs`` prints the table of docs/guides/ranks.md. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardedModel:
    """Bytes that a step reads and sends.

    Args:
        weights: bytes of which every rank reads its part.
        whole: bytes that every rank reads completely.
        layers, hidden: L and M.
        value_bytes: bytes of one number of a hidden state.
        sums_per_layer: all-reduces of a layer; one if attention is not sharded.
    """

    weights: float
    whole: float
    layers: int
    hidden: int
    value_bytes: int
    sums_per_layer: int = 2

    @property
    def sums(self) -> int:
        """All-reduces of a step: of the embedding, and those of the layers."""
        return self.sums_per_layer * self.layers + 1


@dataclass(frozen=True)
class RankSpeeds:
    """Speed of reading and of sending.

    Args:
        read: bytes of weights per second that one rank reads.
        link: bytes per second that a rank receives.
        latency: seconds of an empty collective.
        ring: whether an all-reduce uses a ring, as NCCL's does, which sends ``2 (n - 1) / n`` parts. Otherwise each
            rank receives the parts of all others, as on CPUs (:func:`speccompile.ops.collective.all_reduce`).
        place: additional time of each further position of a row, relative to the time that one rank needs to read all
            weights.
    """

    read: float
    link: float
    latency: float
    ring: bool = True
    place: float = 0.01


def step_seconds(model: ShardedModel, machine: RankSpeeds, *, ranks: int, width: int, rows: int = 1) -> float:
    """Seconds of a step of ``rows`` rows of ``width`` positions over ``ranks``.

    Weights are read once. Each further position adds a share of that time. Every all-reduce has the hidden states of
    all positions. The choice and the message of rank 0 are two collectives of a few bytes.
    """
    reading = (model.weights / ranks + model.whole) / machine.read * (1 + machine.place * (rows * width - 1))
    if ranks == 1:
        return reading
    part = rows * width * model.hidden * model.value_bytes
    parts = 2 * (ranks - 1) / ranks if machine.ring else ranks - 1
    sending = model.sums * (machine.latency + parts * part / machine.link)
    return reading + sending + 2 * machine.latency


def fitted(
    model: ShardedModel, steps: Mapping[int, float], collectives: Mapping[int, float], *, ring: bool
) -> RankSpeeds:
    """Fit a machine to measured times by least squares. Errors of steps are relative to their time.

    Args:
        steps: seconds of a step of one rank that has the whole model, by width.
        collectives: seconds of a collective over two ranks, by the bytes that a rank receives.
    """
    widths, times = torch.tensor([*steps], dtype=torch.float64), torch.tensor([*steps.values()], dtype=torch.float64)
    of_weights, of_place = _line(widths - 1, times, 1 / times)
    sizes = torch.tensor([*collectives], dtype=torch.float64)
    taken = torch.tensor([*collectives.values()], dtype=torch.float64)
    latency, of_byte = _line(sizes, taken, 1 / taken)
    read = (model.weights + model.whole) / of_weights
    return RankSpeeds(read, 1 / max(of_byte, 1e-15), max(latency, 0.0), ring, max(of_place / of_weights, 0.0))


def _line(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[float, float]:
    """Value at 0 and slope of the line through ``y``."""
    terms = torch.stack([torch.ones_like(x), x], 1) * weights[:, None]
    start, slope = torch.linalg.lstsq(terms, (y * weights)[:, None]).solution[:, 0].tolist()
    return start, slope


def emitted(draft_len: int, chance: float) -> float:
    """Expected tokens of a step whose drafts are each right with probability ``chance``: the sum of its powers up to
    ``draft_len``."""
    return sum(chance**accepted for accepted in range(draft_len + 1))


def gain(
    model: ShardedModel, machine: RankSpeeds, draft_len: int, *, ranks: int, rows: int = 1, chance: float = 0.7
) -> float:
    """Tokens per second with drafts over tokens per second without."""
    plain = step_seconds(model, machine, ranks=ranks, width=1, rows=rows)
    drafted = step_seconds(model, machine, ranks=ranks, width=draft_len + 1, rows=rows)
    return emitted(draft_len, chance) * plain / drafted


def best_draft_len(
    model: ShardedModel, machine: RankSpeeds, *, ranks: int, rows: int = 1, chance: float = 0.7, most: int = 15
) -> int:
    """Draft length with the most tokens per second; 0 if speculation does not pay."""
    return max(range(most + 1), key=lambda size: gain(model, machine, size, ranks=ranks, rows=rows, chance=chance))


#: Llama-3.1-8B in bfloat16: 8.03e9 parameters, all of them sharded.
LLAMA_8B = ShardedModel(weights=16.06e9, whole=0.0, layers=32, hidden=4096, value_bytes=2)
#: Links by name: bytes a second and seconds, in one direction.
LINKS: dict[str, tuple[float, float]] = {
    "NVLink, 450 GB/s, 10 us": (450e9, 10e-6),
    "PCIe 4, 25 GB/s, 20 us": (25e9, 20e-6),
    "100 Gbit/s, 12 GB/s, 40 us": (12e9, 40e-6),
    "10 Gbit/s, 1.2 GB/s, 80 us": (1.2e9, 80e-6),
}
#: One accelerator that reads 2 TB/s.
READ = 2e12


def table(ranks: Sequence[int] = (1, 2, 4, 8), rows: Sequence[int] = (1, 32)) -> str:
    """Markdown table by link, rows and ranks: milliseconds of a step without drafts, and the best draft length with its
    gain."""
    head = ["link", "rows", *(f"n={count}" for count in ranks)]
    lines = [head, ["---", "---:", *["---:"] * len(ranks)]]
    for name, (link, latency) in LINKS.items():
        machine = RankSpeeds(READ, link, latency)
        for count in rows:
            cells = []
            for size in ranks:
                plain = 1e3 * step_seconds(LLAMA_8B, machine, ranks=size, width=1, rows=count)
                best = best_draft_len(LLAMA_8B, machine, ranks=size, rows=count)
                found = gain(LLAMA_8B, machine, best, ranks=size, rows=count)
                cells.append(f"{plain:.1f} ms, K={best}, {found:.2f}x")
            lines.append([name, str(count), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(table())
