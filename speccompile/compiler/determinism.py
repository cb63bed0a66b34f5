"""Proves, at build time, that a context's logits do not depend on where in a step it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from speccompile.errors import DeterministicUnavailable
from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph

Run = Callable[..., Any]


@dataclass(frozen=True)
class Placement:
    """Where a context's newest token stands: which row, and which place, of steps of ``rows`` rows and ``width``."""

    rows: int
    width: int
    row: int
    place: int

    def __str__(self) -> str:
        return f"row {self.row}, place {self.place} of a [{self.rows}, {self.width}] step"


def everywhere(rows: int, width: int) -> list[Placement]:
    """All places of one shape."""
    return [Placement(rows, width, row, place) for row in range(rows) for place in range(width)]


def corners(rows: int, width: int) -> list[Placement]:
    """First and last places of the shapes between one token and ``[rows, width]``, and a whole prompt at once."""
    ends = [
        end
        for shape in ((1, 1), (1, width), (rows, 1), (rows, width))
        for end in (Placement(*shape, 0, 0), Placement(*shape, shape[0] - 1, shape[1] - 1))
    ]
    return list(dict.fromkeys([*ends, Placement(1, 3 * width, 0, 3 * width - 1)]))


def prove_deterministic(
    outlined: StepGraph, captured: StepGraph, lowered: Run, arena: Arena, placements: Sequence[Placement]
) -> None:
    """Compute one context at all ``placements``, its newest KV in steps of the same shape, among other neighbours.

    Args:
        lowered: ``outlined`` as the backend lowers it.

    Raises:
        DeterministicUnavailable: two placements differ in a bit; names the first op that shows it.
    """
    probe = _Probe(arena)
    first, *others = [placement for placement in placements if placement.place <= probe.target]
    with torch.no_grad():
        expected = probe.logits(lowered, outlined, first)
        for placement in others:
            found = probe.logits(lowered, outlined, placement)
            if not torch.equal(expected, found):
                change = float((expected - found).abs().max())
                raise DeterministicUnavailable(
                    evidence=f"the same context gave logits {change:.3g} apart in {placement} and in {first}",
                    op=_first_op(captured, probe, first, placement),
                )


class _Probe:
    """One context that can be computed at any placement, with other text in the other rows."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        layout = arena.layout
        # Two steps of text before the last one, so that keys written by a step of this very shape are read as well.
        length = min(3 * layout.max_width, layout.max_len)
        self.target = length - 1
        generator = torch.Generator().manual_seed(0)
        shape = (2, length + 3 * layout.max_width)
        self.text, self.noise = torch.randint(layout.vocab_size, shape, generator=generator).to(arena.device)

    def logits(self, run: Run, graph: StepGraph, at: Placement) -> torch.Tensor:
        """Logits ``[V]`` of the context."""
        final = self.target - at.place
        steps = [(first, at.width) for first in [*range(0, final, at.width), final][-3:]]
        lead, _ = steps[0]
        if lead > 0:
            # At once: token by token it would take longer than all the rest of the proof.
            steps = [(0, lead), *steps]
        absorbed = 0
        for number, (first, width) in enumerate(steps):
            # A recurrent state absorbs a step's tokens when the next one accepts them.
            settled = lead if number == 0 else first
            inputs = self._inputs(at, first, width) | {
                "row_absorbed": torch.full((at.rows,), absorbed, device=self.arena.device),
                "row_settled": torch.full((at.rows,), settled, device=self.arena.device),
            }
            absorbed = settled
            logits = run(*_arguments(graph, self.arena, inputs))[0]
        result: torch.Tensor = logits[at.row, at.place]
        return result

    def _inputs(self, at: Placement, first: int, width: int) -> dict[str, torch.Tensor]:
        device, last = self.arena.device, first + width
        ids = [(self.text if index == at.row else self.noise)[first:last] for index in range(at.rows)]
        return {
            "input_ids": torch.stack(ids),
            "position_ids": torch.arange(first, last, device=device).repeat(at.rows, 1),
            "row_slots": torch.arange(at.rows, device=device),
        }


def _arguments(graph: StepGraph, arena: Arena, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    arguments = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        value = inputs.get(node.name) if port.role == "input" else port.value
        arguments.append(arena[node.name] if value is None else value)
    return arguments


def _first_op(captured: StepGraph, probe: _Probe, one: Placement, other: Placement) -> str:
    """Run the flat graph op by op with the context in both places; the first op whose values differ."""
    first, second = _Recorder(captured, one), _Recorder(captured, other)
    for recorder in (first, second):
        probe.logits(recorder.run, captured, recorder.at)
    for name, value in first.seen.items():
        if not torch.equal(value, second.seen[name]):
            return name
    return "one inside a compiled decoder layer (none in eager mode)"


class _Recorder(fx.Interpreter):
    """Keeps what every op computed for one row and place in the newest run."""

    def __init__(self, graph: StepGraph, at: Placement) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph.graph))
        # The example sizes occur nowhere else, so they tell a [B, T, ...] value from, say, a [B, H, ...] one.
        self.leading = (graph.sizes["B"], graph.sizes["T"])
        self.at = at
        self.seen: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        example = n.meta.get("val")
        if n.op == "call_function" and isinstance(example, torch.Tensor) and example.shape[:2] == self.leading:
            self.seen[f"{n.target} ({n.name})"] = value[self.at.row, self.at.place].clone()
        return value
