"""The capture check: a step graph has to compute what the model computes, or it is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import CaptureMismatch, LoweringError, UnsupportedModel, error_line
from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.model_info import ModelInfo, decoder_layers, special_tokens
from speccompile.graph_capture.observe import accepts
from speccompile.utils.transformers_version import cache_argument

# Share of the largest logit by which two correct forwards of one model may differ.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Share of the tokens that may differ by more: in half precision two correct forwards send a token whose router is
# almost undecided to different experts. What makes a graph wrong (mask, positions, scale) shows at most tokens.
UNDECIDED = {torch.float32: 0.0, torch.float16: 0.1, torch.bfloat16: 0.1}

# The end of a text is compared in these pieces. Earlier pieces only fill the cache, as many
# as make the text longer than any window; the border of the longest lies inside what is compared.
PIECES = (19, 1, 5, 23)
COMPARED = sum(PIECES)
LEAD = 256
DECODED = 4

Run = Callable[..., Any]


def check_capture(
    model: PreTrainedModel,
    info: ModelInfo,
    graph: StepGraph,
    arena: Arena,
    lowered: Run,
    reference: Callable[[StepGraph], Run],
    reach: int = 0,
    probe: Probe | None = None,
) -> float:
    """Compare logits on random text, fed in pieces of different width, two ragged rows at a time.

    Args:
        graph: captured, with the inputs ``input_ids``, ``position_ids``, ``row_slots``.
        lowered: the graph as the backend lowers it; ``reference`` lowers one as the eager backend does.
        reach: the longest window or chunk of the model's masks; the text is longer, as far as ``max_len`` allows.
        probe: the text and the model's logits, if they were computed before.

    Returns:
        The largest difference seen.

    Raises:
        CaptureMismatch: the graph itself is wrong; names the first decoder layer that differs.
        LoweringError: the graph is right and the backend's version of it is not.
        UnsupportedModel: the model's own forward fails.
    """
    probe = probe or Probe.of(model, info, arena, reach)
    allowed = TOLERANCE[probe.precision] * float(probe.expected.abs().max())
    difference, where = _largest_difference(graph, probe, lowered)
    if difference <= allowed:
        return difference
    captured, captured_where = _largest_difference(graph, probe, reference(graph))
    if captured <= allowed:
        raise LoweringError(
            f"the compiled graph differs from the captured one by {difference:.3g} (allowed {allowed:.3g}) {where}; "
            "use backend='eager'",
            difference=difference,
            allowed=allowed,
            where=where,
        )
    where = f"{captured_where}; {_first_wrong_layer(model, info, graph, probe, reference)}"
    fields: dict[str, Any] = {"model": info.name, "difference": captured, "allowed": allowed, "where": where}
    if accepts(model, "position_ids"):
        raise CaptureMismatch(**fields)
    raise CaptureMismatch(
        f"{info.name} cannot be captured: it takes no position_ids, so that rows cannot stand at positions of "
        f"their own (logits differ by {captured:.3g}, allowed {allowed:.3g}, {where}).",
        missing="position_ids",
        **fields,
    )


@dataclass(frozen=True)
class Piece:
    """One run of the check.

    Args:
        rows: of the text.
        starts: where each begins.
        absorbed, settled: where the recurrent state of each row stands before and after it, if the model has one.
    """

    rows: list[int]
    starts: list[int]
    width: int
    absorbed: list[int]
    settled: list[int]


@dataclass(frozen=True)
class Probe:
    """Text ``[2, length]`` and the model's own logits for its last ``COMPARED`` tokens."""

    text: torch.Tensor
    expected: torch.Tensor
    arena: Arena
    precision: torch.dtype

    @staticmethod
    def of(model: PreTrainedModel, info: ModelInfo, arena: Arena, reach: int, max_len: int | None = None) -> Probe:
        """``max_len`` is the longest text that the model is for; None is that of the arena.

        Raises:
            UnsupportedModel: the model's own forward fails, or does not agree with itself.
        """
        lead = max(0, reach - COMPARED // 2)
        length = min(COMPARED + lead, max_len or arena.layout.max_len)
        generator = torch.Generator().manual_seed(0)
        ordinary = torch.tensor(sorted(set(range(info.vocab_size)) - special_tokens(model)))
        text = ordinary[torch.randint(len(ordinary), (2, length), generator=generator)].to(info.device)
        compared = min(COMPARED, length)
        # All logits of a long text would take more memory than the model.
        only = {"logits_to_keep": compared} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        try:
            with torch.no_grad():
                rows = [model(input_ids=row[None], use_cache=False, **only).logits[:, -compared:] for row in text]
                own = _decoded(model, text[:1], only)
        except Exception as error:
            raise UnsupportedModel(model=info.name, reason=f"its own forward fails: {error_line(error)}") from error
        expected = torch.cat(rows)
        difference = min(_differences(own, expected[0, -own.shape[0] :]))
        if difference > TOLERANCE[info.dtype] * float(expected.abs().max()):
            raise UnsupportedModel(
                model=info.name,
                reason="transformers itself computes other logits with a KV cache than without "
                f"(difference {difference:.3g}), so neither text is the right one",
            )
        return Probe(text, expected, arena, info.dtype)

    @property
    def lead(self) -> int:
        """How many tokens only fill the cache."""
        return self.text.shape[1] - self.expected.shape[1]

    def pieces(self, graph: StepGraph) -> Iterator[Piece]:
        """The text in pieces. The first one is the first row's alone, so that the rows stand at different positions."""
        absorbed = [0, 0]
        for rows, starts, width in self._cuts():
            for row, start in zip(rows, starts, strict=True):
                if "row_settled" in graph.ports and start < absorbed[row]:
                    # A recurrent state cannot go back.
                    absorbed[row] = 0
                    if start:
                        yield self._piece([row], [0], start, absorbed)
            yield self._piece(rows, starts, width, absorbed)

    def _piece(self, rows: list[int], starts: list[int], width: int, absorbed: list[int]) -> Piece:
        """A piece from ``absorbed`` on, which it advances past all of its tokens, as a prompt's chunk does."""
        before = [absorbed[row] for row in rows]
        for row, start in zip(rows, starts, strict=True):
            absorbed[row] = start + width
        return Piece(rows, starts, width, before, [absorbed[row] for row in rows])

    def _cuts(self) -> Iterator[tuple[list[int], list[int], int]]:
        """(rows, where each starts, width) of each piece."""
        for start in range(0, self.lead, LEAD):
            yield [0, 1], [start, start], min(LEAD, self.lead - start)
        starts, length = [self.lead, self.lead], self.text.shape[1]
        for number, piece in enumerate((*PIECES, *PIECES[::-1])):
            width = min(piece, length - self.lead)
            rows = [0] if number == 0 else [0, 1]
            for row in rows:
                starts[row] = min(starts[row], length - width)
            yield rows, [starts[row] for row in rows], width
            for row in rows:
                starts[row] += width

    def inputs(self, graph: StepGraph, piece: Piece) -> list[torch.Tensor]:
        """The values of the graph's ports for one piece of the text, in their order."""
        device = self.text.device
        positions = torch.stack([torch.arange(start, start + piece.width) for start in piece.starts]).to(device)
        # The second row uses the dummy slot, which no request owns.
        slots = torch.tensor([0, self.arena.layout.dummy_slot], device=device)
        values = {
            "input_ids": self.text[piece.rows].gather(1, positions),
            "position_ids": positions,
            "row_slots": slots[piece.rows],
            "row_absorbed": torch.tensor(piece.absorbed, device=device),
            "row_settled": torch.tensor(piece.settled, device=device),
            # The model's own forward reads all of it at once.
            "row_prompt": torch.full((len(piece.rows),), self.text.shape[1], device=device),
        }
        return [values[n.name] if n.name in values else _bound(graph, n.name, self.arena) for n in graph.placeholders]


def _decoded(model: PreTrainedModel, text: torch.Tensor, only: dict[str, int]) -> torch.Tensor:
    """Logits ``[DECODED, V]`` of the end of ``text`` ``[1, length]`` as ``generate`` computes them, token by token."""
    steps = min(DECODED, text.shape[1] - 1)
    name = cache_argument(model)
    past = getattr(model(input_ids=text[:, :-steps], use_cache=True, **only), name)
    logits = []
    for place in range(text.shape[1] - steps, text.shape[1]):
        inputs = {"input_ids": text[:, place : place + 1], name: past}
        if accepts(model, "position_ids"):
            # Not every forward counts them from the cache's length on.
            inputs["position_ids"] = torch.tensor([[place]], device=text.device)
        result = model(**inputs, use_cache=True)
        logits.append(result.logits[0, -1])
        past = getattr(result, name)
    return torch.stack(logits)


def _bound(graph: StepGraph, name: str, arena: Arena) -> torch.Tensor:
    port = graph.ports[name]
    value = port.value if port.role == "weight" else arena[name]
    assert value is not None
    return value


def _largest_difference(graph: StepGraph, probe: Probe, run: Run) -> tuple[float, str]:
    """The largest difference of a token's logits, ``UNDECIDED`` ones aside, and the piece that has the largest."""
    differences: list[float] = []
    worst, where = -1.0, ""
    for piece in probe.pieces(graph):
        with torch.no_grad():
            logits = run(*probe.inputs(graph, piece))[0]
        if piece.starts[0] < probe.lead:
            continue
        for place, (row, start) in enumerate(zip(piece.rows, piece.starts, strict=True)):
            expected = probe.expected[row, start - probe.lead : start - probe.lead + piece.width]
            # The graph also has logits of tokens that the lm_head cannot choose.
            found = _differences(logits[place, :, : expected.shape[-1]], expected)
            differences += found
            if max(found) > worst:
                worst, where = max(found), f"in tokens {start} to {start + piece.width - 1}"
    return _decided(differences, probe.precision), where


def _differences(computed: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """The largest difference of each row of two ``[T, ...]``; infinite where a number is none."""
    change = (computed - expected).abs().flatten(1).amax(1).float()
    return torch.where(change.isfinite(), change, torch.inf).tolist()


def _decided(differences: list[float], dtype: torch.dtype) -> float:
    """The largest of ``differences`` when ``UNDECIDED`` of them are left out; infinite ones never are."""
    compared = sorted(differences)[: math.ceil(len(differences) * (1 - UNDECIDED[dtype]))]
    return math.inf if math.inf in differences else compared[-1]


def _first_wrong_layer(
    model: PreTrainedModel, info: ModelInfo, graph: StepGraph, probe: Probe, reference: Callable[[StepGraph], Run]
) -> str:
    """Which decoder layer first leaves another hidden state than the model's, over the first row's text."""
    tapped = graph.copy()
    tapped.set_outputs(*tapped.anchors.layers)
    run = reference(tapped)
    found: dict[int, torch.Tensor] = {}

    def record(index: int, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        # A layer may keep its streams in another form, and one without a place in this forward is never called.
        if state.shape[:2] == probe.text[:1].shape:
            found[index] = state

    path, layers = decoder_layers(model)
    with altering(model):
        handles = [
            layer.register_forward_hook(lambda _module, _inputs, output, index=index: record(index, output))
            for index, layer in enumerate(layers)
        ]
        try:
            with torch.no_grad():
                model(input_ids=probe.text[:1], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
    differences: dict[int, list[float]] = {index: [] for index in found}
    for piece in probe.pieces(graph):
        with torch.no_grad():
            hidden = run(*probe.inputs(tapped, piece))
        if piece.rows[0] != 0:
            continue
        start = piece.starts[0]
        for index, expected in found.items():
            differences[index] += _differences(hidden[index][0], expected[0, start : start + piece.width])
    for index, change in differences.items():
        share = _decided(change, probe.precision) / float(found[index].abs().max())
        if share > TOLERANCE[probe.precision]:
            kind = type(layers[index]).__name__
            return f"first wrong is {path}.{index} ({kind}), by {share:.3g} of its largest value"
    return "no decoder layer alone is wrong"
