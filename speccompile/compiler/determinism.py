"""Build-time proofs that a context's logits do not depend on its row and position in a step of a chain or a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from speccompile.errors import DeterministicUnavailable
from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.rope_positions import ROPE_POSITIONS, of_text

Run = Callable[..., Any]
#: A lowered model, and the graph whose ports are its arguments.
Model = tuple[Run, StepGraph]


@dataclass(frozen=True)
class Placement:
    """The row and the position of a context's newest token in steps of ``rows`` rows and ``width``."""

    rows: int
    width: int
    row: int
    place: int

    def __str__(self) -> str:
        return f"row {self.row}, position {self.place} of a [{self.rows}, {self.width}] step"


def everywhere(rows: int, width: int) -> list[Placement]:
    """All positions of one shape."""
    return [Placement(rows, width, row, place) for row in range(rows) for place in range(width)]


def corners(rows: int, width: int) -> list[Placement]:
    """First and last positions of the shapes between one token and ``[rows, width]``, and a whole prompt at once."""
    ends = [
        end
        for shape in ((1, 1), (1, width), (rows, 1), (rows, width))
        for end in (Placement(*shape, 0, 0), Placement(*shape, shape[0] - 1, shape[1] - 1))
    ]
    return list(dict.fromkeys([*ends, Placement(1, 3 * width, 0, 3 * width - 1)]))


@dataclass(frozen=True)
class TreePlacement:
    """The path of a context's newest tokens in a step of ``rows`` trees: in one row, the nodes 0, 2, 4, ...

    Each node on this path but the last has two children. The first is a token of another sequence, the second is the
    next node of the path.
    """

    rows: int
    nodes: int
    row: int

    def __str__(self) -> str:
        return f"row {self.row} of {self.rows}, on a path of a tree of {self.nodes} nodes"


def tree_corners(rows: int, sizes: Iterable[int]) -> list[TreePlacement]:
    """The first and the last row of steps of one row and of ``rows`` rows, for trees of each number of nodes."""
    ends = [(1, 0), (rows, 0), (rows, rows - 1)]
    return list(dict.fromkeys(TreePlacement(count, nodes, row) for nodes in sizes for count, row in ends))


def prove_deterministic(
    outlined: StepGraph, captured: StepGraph, lowered: Run, arena: Arena, placements: Sequence[Placement]
) -> None:
    """Compute one context at all ``placements``, its newest KV in steps of the same shape, among other neighbours.

    Args:
        lowered: ``outlined`` as the backend lowers it.

    Raises:
        DeterministicUnavailable: two placements differ in a bit; it has the name of the first op that differs.
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
                    evidence=f"logits of the same context differ by {change:.3g} between {placement} and {first}",
                    op=_first_op(captured, probe, first, placement),
                )


def prove_trees(chain: Model, tree: Model, arena: Arena, placements: Sequence[TreePlacement]) -> None:
    """Compute one context in a step of one token and, at all ``placements``, as a path of a tree.

    Args:
        chain: the outlined model, as the backend lowers it, and its graph.
        tree: the model over trees (:func:`~speccompile.passes.target.tree_bodies.of_trees`), lowered, and its graph.

    Raises:
        DeterministicUnavailable: they differ in a bit.
    """
    probe = _Probe(arena)
    alone = Placement(1, 1, 0, 0)
    with torch.no_grad():
        expected = probe.logits(*chain, alone)
        for placement in placements:
            found = probe.tree_logits(chain, tree, placement)
            if not torch.equal(expected, found):
                change = float((expected - found).abs().max())
                raise DeterministicUnavailable(
                    evidence=f"logits of the same context differ by {change:.3g} between {placement} and {alone}",
                    op="an op of a decoder layer over trees",
                )


class _Probe:
    """One context that can be computed at any placement, with other sequences in the other rows."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        layout = arena.layout
        # Two steps of tokens before the last one: the last step then also reads keys that steps of its shape wrote.
        length = min(3 * layout.max_width, layout.max_len)
        self.target = length - 1
        generator = torch.Generator().manual_seed(0)
        shape = (2, length + 3 * layout.max_width)
        self.text, self.noise = torch.randint(layout.vocab_size, shape, generator=generator).to(arena.device)

    def logits(self, run: Run, graph: StepGraph, at: Placement) -> torch.Tensor:
        """Logits ``[V]`` of the context."""
        with self.arena.all_pages_of(at.row):
            return self._logits(run, graph, at)

    def _logits(self, run: Run, graph: StepGraph, at: Placement) -> torch.Tensor:
        final = self.target - at.place
        steps = [(first, at.width) for first in [*range(0, final, at.width), final][-3:]]
        lead, _ = steps[0]
        if lead > 0:
            # In one step: token by token it would last longer than the rest of the proof.
            steps = [(0, lead), *steps]
        absorbed = 0
        for number, (first, width) in enumerate(steps):
            # A recurrent state absorbs a step's tokens when the next one accepts them.
            settled = lead if number == 0 else first
            inputs = self._inputs(at, first, width) | {
                "row_absorbed": torch.full((at.rows,), absorbed, device=self.arena.device),
                "row_settled": torch.full((at.rows,), settled, device=self.arena.device),
                # Where the prompt ends does not depend on the placement.
                "row_prompt": torch.zeros(at.rows, dtype=torch.int64, device=self.arena.device),
            }
            absorbed = settled
            logits = _run((run, graph), self.arena, inputs)
        result: torch.Tensor = logits[at.row, at.place]
        return result

    def tree_logits(self, chain: Model, tree: Model, at: TreePlacement) -> torch.Tensor:
        """Logits ``[V]`` of the context, whose newest tokens are a path of a tree after a step of the ``chain``."""
        with self.arena.all_pages_of(at.row):
            return self._tree_logits(chain, tree, at)

    def _tree_logits(self, chain: Model, tree: Model, at: TreePlacement) -> torch.Tensor:
        device, depth = self.arena.device, min(at.nodes // 2, self.target)
        root, width = self.target - depth, at.nodes + 1
        if root:
            inputs = self._inputs(Placement(at.rows, root, at.row, 0), 0, root)
            _run(chain, self.arena, inputs)
        nodes = torch.arange(width, device=device)
        # Nodes 2j - 1 and 2j are children of 2j - 2. Nodes deeper than the context have another sequence's tokens.
        depths, parents = (nodes + 1) // 2, (nodes - 1) // 2 * 2
        parents[:1].fill_(-1)
        on_path = (nodes % 2 == 0) & (depths <= depth)
        own = torch.where(on_path, self.text[root + depths], self.noise[root + nodes])
        inputs = {
            "input_ids": torch.stack([own if row == at.row else self.noise[root + nodes] for row in range(at.rows)]),
            "position_ids": (root + depths).repeat(at.rows, 1),
            "row_places": (root + nodes).repeat(at.rows, 1),
            "row_parents": parents.repeat(at.rows, 1),
            "row_slots": torch.arange(at.rows, device=device),
        }
        result: torch.Tensor = _run(tree, self.arena, inputs)[at.row, 2 * depth]
        return result

    def _inputs(self, at: Placement, first: int, width: int) -> dict[str, torch.Tensor]:
        device, last = self.arena.device, first + width
        ids = [(self.text if index == at.row else self.noise)[first:last] for index in range(at.rows)]
        positions = torch.arange(first, last, device=device).repeat(at.rows, 1)
        return {
            "input_ids": torch.stack(ids),
            "position_ids": positions,
            ROPE_POSITIONS: of_text(positions),
            "row_slots": torch.arange(at.rows, device=device),
        }


def _run(model: Model, arena: Arena, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits ``[B, T, V]``."""
    run, graph = model
    logits: torch.Tensor = run(*_arguments(graph, arena, inputs))[0]
    return logits


def _arguments(graph: StepGraph, arena: Arena, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    arguments = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        value = inputs.get(node.name) if port.role == "input" else port.value
        arguments.append(arena[node.name] if value is None else value)
    return arguments


def _first_op(captured: StepGraph, probe: _Probe, one: Placement, other: Placement) -> str:
    """The first op whose values differ between two placements of the context.

    It is searched at the first position where a value differs: the values of earlier positions that it reads are equal.
    """
    first, second = _ValueRecorder(captured, one.row), _ValueRecorder(captured, other.row)
    for recorder, at in ((first, one), (second, other)):
        probe.logits(recorder.run, captured, at)
    for place in sorted(first.seen.keys() & second.seen.keys()):
        if not torch.equal(first.seen[place], second.seen[place]):
            return first.names[place[1]]
    return "an op inside a compiled decoder layer (none in eager mode)"


class _ValueRecorder(fx.Interpreter):
    """Keeps the value of every op for one row at each position. Where a position is computed again, the newest."""

    def __init__(self, graph: StepGraph, row: int) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph.graph))
        self.row = row
        # No other dimension has these example sizes, so they identify the dimensions of rows and positions.
        self.rows, self.width = graph.sizes["B"], graph.sizes["T"]
        # A dimension of this size has scores of all positions of a slot: they differ where attention masks them.
        self.cache_len = graph.layout.cache_len
        #: Values by position and number of the op.
        self.seen: dict[tuple[int, int], torch.Tensor] = {}
        self.names: list[str] = []
        self._first, self._width, self._number = 0, 0, 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._number = 0
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name == "position_ids":
            self._first, self._width = int(value[self.row, 0]), value.shape[1]
        if n.op == "call_function":
            self._keep(n, value)
            self._number += 1
        return value

    def _keep(self, node: fx.Node, value: Any) -> None:
        if self._number == len(self.names):
            self.names.append(f"{node.target} ({node.name})")
        example = node.meta.get("val")
        if isinstance(example, torch.Tensor) and self.cache_len not in example.shape:
            for place, found in enumerate(self._places(value, list(example.shape))):
                self.seen[self._first + place, self._number] = found.clone()

    def _places(self, value: torch.Tensor, sizes: list[int]) -> Iterable[torch.Tensor]:
        """The part of ``value`` at each position of the row; ``sizes`` are those of the example."""
        both = self.rows * self.width
        if [size for size in sizes if size in (self.rows, self.width)] == [self.rows, self.width]:
            return value.movedim(sizes.index(self.width), -1).select(sizes.index(self.rows), self.row).movedim(-1, 0)
        if both in sizes:
            return value.movedim(sizes.index(both), 0).unflatten(0, (-1, self._width))[self.row]
        return ()
