"""The capture check: a step graph must compute the model's logits, or it is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import CaptureMismatch, InvalidOption, LoweringError, UnsupportedModel, error_line
from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.encoder_decoder import EncoderOutput, accepts, decode, random_source
from speccompile.graph_capture.fill_cross import fill_cross
from speccompile.graph_capture.model_info import ModelInfo, decoder_layers, special_tokens
from speccompile.graph_capture.rope_positions import ROPE_POSITIONS, of_text
from speccompile.graph_capture.rounded_kv import rounding_kv
from speccompile.ops.kv_rows import spacing
from speccompile.utils.transformers_version import cache_argument

# Maximal difference of two correct forwards of one model, as a share of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Share of the tokens that may differ by more. In half precision two correct forwards may choose different experts for a
# token whose router is almost undecided. A wrong graph (mask, positions, scale) differs at most tokens.
UNDECIDED = {torch.float32: 0.0, torch.float16: 0.1, torch.bfloat16: 0.1}

# The last tokens are compared in pieces of these widths. Earlier pieces only fill the cache. They extend the sequence
# beyond any window, and the border of the longest window lies inside the compared part.
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
    kv: torch.dtype | None = None,
) -> float:
    """Compare logits on random tokens, in pieces of different width, two ragged rows at a time.

    Args:
        graph: a captured graph with the inputs ``input_ids``, ``position_ids``, ``row_slots``.
        lowered: the graph as the backend lowers it.
        reference: lowers a graph as the eager backend does.
        reach: the longest window or chunk of the model's masks. The sequence is longer, if ``max_len`` allows it.
        probe: the tokens and the model's logits, if they were computed before.
        kv: dtype to which the graph rounds keys and values; None is the model's own.

    Returns:
        The largest difference.

    Raises:
        CaptureMismatch: the graph itself is wrong; the error names the first decoder layer that differs.
        LoweringError: the graph is right, but the backend's executable is not.
        UnsupportedModel: the model's own forward fails.
    """
    probe = probe or Probe.of(model, info, arena, reach, kv=kv)
    if probe.source is not None:
        for row, slot in enumerate(probe.slots):
            fill_cross(model, arena, slot, probe.source.row(row))
    allowed = probe.tolerance * float(probe.expected.abs().max())
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
        f"{info.name} cannot be captured: it accepts no position_ids, so rows cannot have their own positions "
        f"(logits differ by {captured:.3g}, allowed {allowed:.3g}, {where}).",
        missing="position_ids",
        **fields,
    )


@dataclass(frozen=True)
class ProbePiece:
    """A piece of the probe's sequence: one run of the check.

    Args:
        rows: rows of the sequence.
        starts: position of each row's first token.
        absorbed, settled: positions of each row's recurrent state before and after the run, if the model has one.
    """

    rows: list[int]
    starts: list[int]
    width: int
    absorbed: list[int]
    settled: list[int]


@dataclass(frozen=True)
class Probe:
    """Token ids ``[2, length]`` and the model's own logits for the last ``COMPARED`` tokens, with keys and values
    rounded to ``kv``, over the output ``source`` of an encoder, if the model has one."""

    text: torch.Tensor
    expected: torch.Tensor
    arena: Arena
    precision: torch.dtype
    kv: torch.dtype | None = None
    source: EncoderOutput | None = None

    @property
    def slots(self) -> tuple[int, int]:
        """The slots of the rows. The second one is the dummy slot, which no request owns."""
        return 0, self.arena.layout.dummy_slot

    @property
    def tolerance(self) -> float:
        """Maximal difference of two correct forwards, as a share of the largest logit. Where keys and values are
        rounded, the last bits of a forward decide on the rounding of some of them, and each changes by an epsilon."""
        rounding = 0.0 if self.kv is None else 2 * spacing(self.kv)
        return max(TOLERANCE[self.precision], rounding)

    @staticmethod
    def of(
        model: PreTrainedModel,
        info: ModelInfo,
        arena: Arena,
        reach: int,
        max_len: int | None = None,
        kv: torch.dtype | None = None,
    ) -> Probe:
        """Create the tokens and compute the model's logits.

        Args:
            max_len: the longest sequence that the model supports; None means the arena's.
            kv: the model's keys and values are rounded to this dtype.

        Raises:
            UnsupportedModel: the model's own forward fails, or differs with and without a cache.
        """
        lead = max(0, reach - COMPARED // 2)
        length = min(COMPARED + lead, max_len or arena.layout.max_len)
        # Both rows of the check have a slot.
        length = min(length, *map(arena.positions, (0, arena.layout.dummy_slot)))
        generator = torch.Generator().manual_seed(0)
        ordinary = torch.tensor(sorted(set(range(info.vocab_size)) - special_tokens(model)))
        text = ordinary[torch.randint(len(ordinary), (2, length), generator=generator)].to(info.device)
        compared = min(COMPARED, length)
        source = None if info.source_positions is None else random_source(model, info.source_positions, len(text))
        # All logits of a long sequence would need more memory than the model.
        only = {"logits_to_keep": compared} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        try:
            with torch.no_grad(), rounding_kv(kv):
                cached = {"use_cache": kv is not None, **only}
                sources = [None if source is None else source.row(index) for index in range(len(text))]
                rows = [
                    decode(model, of_row, input_ids=row[None], **cached).logits[:, -compared:]
                    for row, of_row in zip(text, sources, strict=True)
                ]
                own = _decoded(model, sources[0], text[:1], only)
        except Exception as error:
            raise UnsupportedModel(model=info.name, reason=f"its own forward fails: {error_line(error)}") from error
        expected = torch.cat(rows)
        if kv not in (None, torch.bfloat16) and not expected.isfinite().all():
            form = str(kv).removeprefix("torch.")
            reason = f"logits over keys and values in {form} are not finite; use bfloat16, whose range is float32's"
            raise InvalidOption(where="wrap", name="kv", value=form, reason=reason)
        difference = min(_differences(own, expected[0, -own.shape[0] :]))
        probe = Probe(text, expected, arena, info.dtype, kv, source)
        if difference > probe.tolerance * float(expected.abs().max()):
            raise UnsupportedModel(
                model=info.name,
                reason="transformers itself computes other logits with a KV cache than without "
                f"(difference {difference:.3g}), so neither of them can be the reference",
            )
        return probe

    @property
    def lead(self) -> int:
        """Number of tokens that only fill the cache."""
        return self.text.shape[1] - self.expected.shape[1]

    def pieces(self, graph: StepGraph) -> Iterator[ProbePiece]:
        """Yield the sequence in pieces. The first piece only has the first row, so rows have different positions."""
        absorbed = [0, 0]
        for rows, starts, width in self._cuts():
            for row, start in zip(rows, starts, strict=True):
                if "row_settled" in graph.ports and start < absorbed[row]:
                    # A recurrent state cannot go back, so the row starts again.
                    absorbed[row] = 0
                    if start:
                        yield self._piece([row], [0], start, absorbed)
            yield self._piece(rows, starts, width, absorbed)

    def _piece(self, rows: list[int], starts: list[int], width: int, absorbed: list[int]) -> ProbePiece:
        """Return a piece that starts at ``absorbed``, and advance ``absorbed`` past its tokens, as a prompt's chunk."""
        before = [absorbed[row] for row in rows]
        for row, start in zip(rows, starts, strict=True):
            absorbed[row] = start + width
        return ProbePiece(rows, starts, width, before, [absorbed[row] for row in rows])

    def _cuts(self) -> Iterator[tuple[list[int], list[int], int]]:
        """Yield (rows, start of each row, width) of each piece."""
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

    def inputs(self, graph: StepGraph, piece: ProbePiece) -> list[torch.Tensor]:
        """Return the values of the graph's ports for one piece, in their order."""
        device = self.text.device
        positions = torch.stack([torch.arange(start, start + piece.width) for start in piece.starts]).to(device)
        slots = torch.tensor(self.slots, device=device)
        values = {
            "input_ids": self.text[piece.rows].gather(1, positions),
            "position_ids": positions,
            ROPE_POSITIONS: of_text(positions),
            "row_slots": slots[piece.rows],
            "row_absorbed": torch.tensor(piece.absorbed, device=device),
            "row_settled": torch.tensor(piece.settled, device=device),
            # The model's own forward reads the whole sequence at once.
            "row_prompt": torch.full((len(piece.rows),), self.text.shape[1], device=device),
        }
        return [values[n.name] if n.name in values else _bound(graph, n.name, self.arena) for n in graph.placeholders]


def _decoded(
    model: PreTrainedModel, source: EncoderOutput | None, text: torch.Tensor, only: dict[str, int]
) -> torch.Tensor:
    """Return logits ``[DECODED, V]`` of the end of ``text`` ``[1, length]``, decoded by token as in ``generate``."""
    steps = min(DECODED, text.shape[1] - 1)
    name = cache_argument(model)
    past = getattr(decode(model, source, input_ids=text[:, :-steps], use_cache=True, **only), name)
    logits = []
    for position in range(text.shape[1] - steps, text.shape[1]):
        inputs = {"input_ids": text[:, position : position + 1], name: past}
        if accepts(model, "position_ids"):
            # Not every forward counts positions from the cache's length on.
            inputs["position_ids"] = torch.tensor([[position]], device=text.device)
        result = decode(model, source, **inputs, use_cache=True)
        logits.append(result.logits[0, -1])
        past = getattr(result, name)
    return torch.stack(logits)


def _bound(graph: StepGraph, name: str, arena: Arena) -> torch.Tensor:
    port = graph.ports[name]
    value = port.value if port.role == "weight" else arena[name]
    assert value is not None
    return value


def _largest_difference(graph: StepGraph, probe: Probe, run: Run) -> tuple[float, str]:
    """Return the largest difference of a token's logits, except ``UNDECIDED`` ones, and the piece with the largest."""
    differences: list[float] = []
    worst, where = -1.0, ""
    for piece in probe.pieces(graph):
        with torch.no_grad():
            logits = run(*probe.inputs(graph, piece))[0]
        if piece.starts[0] < probe.lead:
            continue
        for index, (row, start) in enumerate(zip(piece.rows, piece.starts, strict=True)):
            expected = probe.expected[row, start - probe.lead : start - probe.lead + piece.width]
            # The graph also has logits of token ids that the lm_head cannot choose.
            found = _differences(logits[index, :, : expected.shape[-1]], expected)
            differences += found
            if max(found) > worst:
                worst, where = max(found), f"in tokens {start} to {start + piece.width - 1}"
    return _decided(differences, probe.precision), where


def _differences(computed: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Return the largest difference of each row of two ``[T, ...]``; infinite if a value is NaN or infinite."""
    change = (computed - expected).abs().flatten(1).amax(1).float()
    return torch.where(change.isfinite(), change, torch.inf).tolist()


def _decided(differences: list[float], dtype: torch.dtype) -> float:
    """Return the largest of ``differences`` after the ``UNDECIDED`` largest ones are dropped. Infinite differences are
    never dropped."""
    compared = sorted(differences)[: math.ceil(len(differences) * (1 - UNDECIDED[dtype]))]
    return math.inf if math.inf in differences else compared[-1]


def _first_wrong_layer(
    model: PreTrainedModel, info: ModelInfo, graph: StepGraph, probe: Probe, reference: Callable[[StepGraph], Run]
) -> str:
    """Name the first decoder layer whose hidden state differs from the model's, over the first row."""
    tapped = graph.copy()
    tapped.set_outputs(*tapped.anchors.layers)
    run = reference(tapped)
    found: dict[int, torch.Tensor] = {}

    def record(index: int, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        # A layer may return another form of hidden state. A layer that this forward does not use is never called.
        if state.shape[:2] == probe.text[:1].shape:
            found[index] = state

    path, layers = decoder_layers(model)
    with altering(model), rounding_kv(probe.kv):
        handles = [
            layer.register_forward_hook(lambda _module, _inputs, output, index=index: record(index, output))
            for index, layer in enumerate(layers)
        ]
        try:
            with torch.no_grad():
                source = None if probe.source is None else probe.source.row(0)
                decode(model, source, input_ids=probe.text[:1], use_cache=probe.kv is not None)
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
        if share > probe.tolerance:
            kind = type(layers[index]).__name__
            return f"first wrong is {path}.{index} ({kind}), by {share:.3g} of its largest value"
    return "no single decoder layer is wrong"
