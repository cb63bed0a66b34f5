"""Proves, at build time, that a context's logits do not depend on where in a step it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from speccompile.errors import DeterministicUnavailable
from speccompile.graph_capture.graph import StepGraph
from speccompile.runtime.arena import Arena

Run = Callable[..., Any]


def prove_deterministic(outlined: StepGraph, captured: StepGraph, lowered: Run, arena: Arena, width: int) -> None:
    """Compute one context at every (row, position) of the shape that all tiers share, among other neighbours.

    Args:
        lowered: ``outlined`` as the backend lowers it.
        width: verify width T of every tier.

    Raises:
        DeterministicUnavailable: two placements differ in a bit; names the first op that shows it.
    """
    rows, vocab = arena.layout.max_batch, arena.layout.vocab_size
    # A context two steps long, so that keys written by a step of this very shape are read as well.
    text_length = min(3 * width, arena.layout.max_len)
    target = text_length - 1
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(vocab, (text_length + width,), generator=generator).to(arena.device)
    noise = torch.randint(vocab, (text_length + width,), generator=generator).to(arena.device)

    def place(run: Run, graph: StepGraph, row: int, back: int) -> torch.Tensor:
        """Logits (and all other values that ``run`` returns) of the context at ``row``, ``back`` places in."""
        result = None
        final = target - back
        for first in [*range(0, final, width), final]:
            last = first + width - 1
            ids = torch.stack([(text if r == row else noise)[first : last + 1] for r in range(rows)])
            positions = torch.arange(first, last + 1, device=arena.device).repeat(rows, 1)
            slots = torch.arange(rows, device=arena.device)
            result = _call(run, graph, arena, ids, positions, slots)
        assert result is not None
        return result[row, back]

    with torch.no_grad():
        wanted = place(lowered, outlined, 0, 0)
        for row in range(rows):
            for back in range(width):
                got = place(lowered, outlined, row, back)
                if not torch.equal(wanted, got):
                    change = float((wanted - got).abs().max())
                    raise DeterministicUnavailable(
                        evidence=f"the same context gave logits {change:.3g} apart in row {row}, place {back} of a "
                        f"step and in row 0, place 0",
                        op=_first_op(captured, arena, text, noise, rows, width, row, back),
                    )


def _call(
    run: Run, graph: StepGraph, arena: Arena, ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    inputs = {"input_ids": ids, "position_ids": positions, "row_slots": slots}
    logits: torch.Tensor = run(*_arguments(graph, arena, inputs))[0]
    return logits


def _arguments(graph: StepGraph, arena: Arena, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    arguments = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        value = inputs.get(node.name) if port.role == "input" else port.value
        arguments.append(arena[node.name] if value is None else value)
    return arguments


def _first_op(
    captured: StepGraph,
    arena: Arena,
    text: torch.Tensor,
    noise: torch.Tensor,
    rows: int,
    width: int,
    row: int,
    back: int,
) -> str:
    """Run the flat graph op by op in both placements at one position; the first op whose values differ."""

    def values(row: int, back: int) -> dict[str, torch.Tensor]:
        ids = torch.stack([(text if r == row else noise)[:width] for r in range(rows)])
        ids[row] = ids[row].roll(back)
        positions = torch.zeros((rows, width), dtype=torch.int64, device=arena.device)
        slots = torch.arange(rows, device=arena.device)
        inputs = {"input_ids": ids, "position_ids": positions, "row_slots": slots}
        recorder = _Recorder(captured, rows, width, row, back)
        recorder.run(*_arguments(captured, arena, inputs))
        return recorder.seen

    first, second = values(0, 0), values(row, back)
    for name, value in first.items():
        if name in second and not torch.equal(value, second[name]):
            return name
    return "one inside a compiled decoder layer (none in eager mode)"


class _Recorder(fx.Interpreter):
    """Keeps what every op computed for one (row, place)."""

    def __init__(self, graph: StepGraph, rows: int, width: int, row: int, back: int) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph.graph))
        self.shape, self.at = (rows, width), (row, back)
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, torch.Tensor) and value.shape[:2] == self.shape:
            self.seen[f"{n.target} ({n.name})"] = value[self.at].clone()
        return value
