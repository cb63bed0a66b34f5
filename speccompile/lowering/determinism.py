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
    probe = _Probe(arena, width)
    with torch.no_grad():
        wanted = probe.logits(lowered, outlined, 0, 0)
        for row in range(probe.rows):
            for back in range(probe.places):
                got = probe.logits(lowered, outlined, row, back)
                if not torch.equal(wanted, got):
                    change = float((wanted - got).abs().max())
                    raise DeterministicUnavailable(
                        evidence=f"the same context gave logits {change:.3g} apart in row {row}, place {back} of a "
                        f"step and in row 0, place 0",
                        op=_first_op(captured, probe, row, back),
                    )


class _Probe:
    """One context that can be computed at any (row, place) of a step, with other text in the other rows."""

    def __init__(self, arena: Arena, width: int) -> None:
        self.arena, self.width, self.rows = arena, width, arena.layout.max_batch
        # Two steps of text before the last one, so that keys written by a step of this very shape are read as well.
        length = min(3 * width, arena.layout.max_len)
        self.target = length - 1
        self.places = min(width, length)
        generator = torch.Generator().manual_seed(0)
        shape = (2, length + width)
        self.text, self.noise = torch.randint(arena.layout.vocab_size, shape, generator=generator).to(arena.device)

    def logits(self, run: Run, graph: StepGraph, row: int, back: int) -> torch.Tensor:
        """Logits ``[V]`` of the context at ``row``, ``back`` places into the step."""
        final = self.target - back
        for first in [*range(0, final, self.width), final]:
            inputs = self._inputs(row, first)
            logits = run(*_arguments(graph, self.arena, inputs))[0]
        result: torch.Tensor = logits[row, back]
        return result

    def _inputs(self, row: int, first: int) -> dict[str, torch.Tensor]:
        device, last = self.arena.device, first + self.width
        ids = [(self.text if index == row else self.noise)[first:last] for index in range(self.rows)]
        return {
            "input_ids": torch.stack(ids),
            "position_ids": torch.arange(first, last, device=device).repeat(self.rows, 1),
            "row_slots": torch.arange(self.rows, device=device),
        }


def _arguments(graph: StepGraph, arena: Arena, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    arguments = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        value = inputs.get(node.name) if port.role == "input" else port.value
        arguments.append(arena[node.name] if value is None else value)
    return arguments


def _first_op(captured: StepGraph, probe: _Probe, row: int, back: int) -> str:
    """Run the flat graph op by op with the context in both places; the first op whose values differ."""
    first, second = _Recorder(captured, 0, 0), _Recorder(captured, row, back)
    for recorder in (first, second):
        probe.logits(recorder.run, captured, *recorder.at)
    for name, value in first.seen.items():
        if not torch.equal(value, second.seen[name]):
            return name
    return "one inside a compiled decoder layer (none in eager mode)"


class _Recorder(fx.Interpreter):
    """Keeps what every op computed for one (row, place) in the newest run."""

    def __init__(self, graph: StepGraph, row: int, back: int) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph.graph))
        # The example sizes occur nowhere else, so they tell a [B, T, ...] value from, say, a [B, H, ...] one.
        self.leading = (graph.sizes["B"], graph.sizes["T"])
        self.at = (row, back)
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        example = n.meta.get("val")
        if n.op == "call_function" and isinstance(example, torch.Tensor) and example.shape[:2] == self.leading:
            self.seen[f"{n.target} ({n.name})"] = value[self.at].clone()
        return value
