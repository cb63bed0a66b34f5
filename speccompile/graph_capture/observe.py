"""Observation of a model: one real forward over a few tokens shows how it attends, and which state it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import UnsupportedModel, error_line
from speccompile.graph.layer_state import IndexShape, KVShape, RecurrentShape
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.alibi import alibi_captured
from speccompile.graph_capture.altering import altering
from speccompile.graph_capture.attention import ROUTES, Running, captured_by, running
from speccompile.graph_capture.cache import RECURRENT, RecordingCache
from speccompile.graph_capture.cross_cache import RecordingCross, with_cross
from speccompile.graph_capture.decoder_positions import decoder_positions_captured
from speccompile.graph_capture.encoder_decoder import EncoderOutput, accepts, decode, random_source
from speccompile.graph_capture.lightning import lightning_captured, lightning_layers
from speccompile.graph_capture.masks import ForeignMask, Mask, MaskLog, UnsupportedByRoute
from speccompile.graph_capture.model_info import ModelInfo, decoder_layers
from speccompile.graph_capture.recurrence import recurrences_captured
from speccompile.graph_capture.rope_positions import has_parts, of_text
from speccompile.ops import collective
from speccompile.utils.devices import traits_of
from speccompile.utils.transformers_version import cache_argument

ROWS, WIDTH = 2, 5
# Positions of the encoder's output.
SOURCE = 3
# Lengths that a cache reports in a probe: one inside every table, one after the end of most tables. XGLM's forward
# builds a table with that many rows.
PROBE_LENGTHS = (7, 2**17)


_SUMMED_KEYS = "keeps one key for several tokens, and also the tokens that have no key yet"
_COUNTED_DISTANCES = "scores keys by their distance, counted from one length that all rows of a cache share"
#: Reasons why a module cannot be captured by any route, by the name of transformers' class.
UNSUPPORTED = {
    "InklingRelativeLogits": _COUNTED_DISTANCES,
    "Inkling2RelativeLogits": _COUNTED_DISTANCES,
    # From transformers 5.24 on.
    "Inkling2RelativePositionBias": _COUNTED_DISTANCES,
    "Inkling2LoopRelativePositionBias": _COUNTED_DISTANCES,
    "DeepseekV4CSACompressor": _SUMMED_KEYS,
    "DeepseekV4HCACompressor": _SUMMED_KEYS,
    "Qwen4ExpTextNGramEmbedding": "looks up a token's vector by the ids before it, which it keeps as recurrent state",
    "Qwen4ExpTextQSAIndexer": "chooses keys by an index that also keeps the positions of all tokens in the cache",
    "RecurrentGemmaRglru": "keeps its state in itself, not in a cache",
    "RwkvSelfAttention": "returns its state, and keeps it in no cache",
    "ZayaCCAProjection": "joins each value with a part of the token's before it, which it keeps as recurrent state",
    "xLSTMLayer": "keeps its state in a cache of another kind than transformers' common one",
}


@dataclass(frozen=True)
class Observation:
    """The facts about a model that a capture needs.

    Args:
        route: the route by which attention is captured. ``reason`` states why it is not the attention op, if so.
        kv: shapes of the tensors that each layer puts into the cache, by layer. A layer that shares another layer's KV
            has none.
        masks: masks that the model requests in one forward, in order.
        reach: the longest window or chunk. The capture check uses a longer sequence.
        recurrent: shapes of the state of each recurrence, by its name in the arena.
        cross: shapes of the keys and values that each layer computes from an encoder's output, by layer.
        index: shapes of the keys that layers keep of each token for an index, by layer.
        counts: whether logits depend on the length that the cache reports, in addition to positions. One graph cannot
            have each row's length, so the capture check uses a sequence of the maximal length.
    """

    route: Route
    kv: dict[int, KVShape]
    masks: tuple[Mask | ForeignMask, ...]
    reach: int
    counts: bool = False
    reason: str = ""
    recurrent: dict[str, RecurrentShape] = field(default_factory=dict)
    index: dict[int, IndexShape] = field(default_factory=dict)
    cross: dict[int, KVShape] = field(default_factory=dict)

    def with_kv(self, dtype: torch.dtype | None) -> Observation:
        """Return the observation with keys and values in ``dtype``; None changes nothing."""
        if dtype is None:
            return self
        return replace(self, kv={layer: shape.stored_in(dtype) for layer, shape in self.kv.items()})


def observe(model: PreTrainedModel, info: ModelInfo, routes: Sequence[Route] = ROUTES) -> Observation:
    """Find the first of ``routes`` by which ``model`` can be captured.

    Raises:
        UnsupportedModel: no route works; the error names the layer, its class, and the reason of the last route.
    """
    for path, module in model.named_modules():
        if reason := UNSUPPORTED.get(type(module).__name__):
            raise UnsupportedModel(model=info.name, reason=f"{path} ({type(module).__name__}) {reason}")
    if not cache_argument(model):
        raise UnsupportedModel(model=info.name, reason=_no_cache(model))
    reasons: list[str] = []
    for route in routes:
        try:
            return _forward(model, info, route, "; ".join(reasons))
        except UnsupportedByRoute as unfit:
            reasons.append(str(unfit))
    raise UnsupportedModel(model=info.name, reason=reasons[-1])


def uses_cache(model: PreTrainedModel) -> bool:
    """Return ``use_cache`` for a forward over the package's cache. With True, MiniMax's forward refuses a cache of
    another class than its own. With False it uses that cache."""
    return not lightning_layers(model)


def _forward(model: PreTrainedModel, info: ModelInfo, route: Route, reason: str) -> Observation:
    positions = torch.arange(WIDTH, device=info.device).repeat(ROWS, 1)
    cache = RecordingCache()
    cross = None if info.source_positions is None else RecordingCross(torch.zeros(ROWS, dtype=torch.int64))
    run = Running(cache, positions, MaskLog(), cross)
    where = ModuleTracker(model)
    with altering(model), where.followed():
        try:
            logits = _logits(model, info, route, run)
        except UnsupportedByRoute as unfit:
            raise UnsupportedByRoute(f"{where}{unfit}") from unfit
        except Exception as error:
            if model._is_stateful:
                raise UnsupportedByRoute(f"{where}{RECURRENT}") from error
            if route == "attention":
                raise UnsupportedByRoute(f"{where}does not attend through transformers' attention interface") from error
            if failed := _own_failure(model, info):
                raise UnsupportedByRoute(f"{where}also fails in its own forward, without a cache: {failed}") from error
            raise UnsupportedByRoute(f"{where}does not run over a KV cache: {error_line(error)}") from error
    kv, recurrent = cache.observed, cache.recurrent
    cache.check_read()
    if not kv and not recurrent:
        raise UnsupportedByRoute(_no_cache(model))
    if model._is_stateful and not recurrent:
        raise UnsupportedByRoute(f"{_first_layer(model)} {RECURRENT}")
    traits = traits_of(info.device)
    if recurrent and not (traits.host_memory or traits.triton_ops):
        reason = (
            f"{_first_layer(model)} keeps a recurrent state, and its ops have no kernels for {info.device.type} yet"
        )
        raise UnsupportedModel(model=info.name, reason=reason)
    crossing = {} if cross is None else cross.observed
    if cross is not None and not crossing:
        raise UnsupportedByRoute("its decoder does not keep the keys and values of the encoder's output in a cache")
    if cross is not None and route == "eager" and not run.masks_cross:
        raise UnsupportedByRoute("its decoder attends to padding of the encoder's output")
    layers = len(kv) + len(crossing)
    if route == "attention" and run.attended < layers:
        raise UnsupportedByRoute(f"attends in {run.attended} of {layers} layers by transformers' attention interface")
    if run.causal and not any(run.causal):
        raise UnsupportedByRoute("it lets a token attend to later ones (it is not causal)")
    masks = tuple(run.masks.seen)
    reach = max([run.reach, *(mask.reach for mask in masks if isinstance(mask, Mask))])
    counts = _counts(model, info, route, positions, logits)
    index = dict(sorted(cache.index.items()))
    return Observation(route, dict(sorted(kv.items())), masks, reach, counts, reason, recurrent, index, crossing)


def _own_failure(model: PreTrainedModel, info: ModelInfo) -> str | None:
    """Return the error of the model's own forward; None if it runs."""
    try:
        with collective.alone(), torch.no_grad():
            ids = torch.zeros((1, WIDTH), dtype=torch.int64, device=info.device)
            decode(model, _source(model, info, 1), input_ids=ids, use_cache=False)
    except Exception as error:
        mixed = sorted({str(parameter.dtype) for parameter in model.parameters()})
        note = f" (its weights are in {', '.join(mixed)}; load it in one dtype)" if len(mixed) > 1 else ""
        return f"{error_line(error)}{note}"
    return None


def _logits(model: PreTrainedModel, info: ModelInfo, route: Route, run: Running) -> torch.Tensor:
    tokens = (torch.arange(ROWS * WIDTH, device=info.device) + info.vocab_size // 2) % info.vocab_size
    with (
        altering(model),
        captured_by(model, route),
        alibi_captured(model, route),
        recurrences_captured(model),
        lightning_captured(model),
        decoder_positions_captured(model) if run.cross is not None else contextlib.nullcontext(),
        running(run),
        # Ranks need not observe at the same time. They need not observe at all if a capture is stored.
        collective.alone(),
        torch.no_grad(),
    ):
        logits: torch.Tensor = decode(
            model,
            _source(model, info, ROWS),
            input_ids=tokens.view(ROWS, WIDTH),
            use_cache=uses_cache(model),
            **{cache_argument(model): with_cross(run.cache, run.cross)},
            **extra_inputs(model, route, run.positions, WIDTH, of_text(run.positions)),
        ).logits
    return logits


def _source(model: PreTrainedModel, info: ModelInfo, rows: int) -> EncoderOutput | None:
    return None if info.source_positions is None else random_source(model, SOURCE, rows)


def _counts(
    model: PreTrainedModel, info: ModelInfo, route: Route, positions: torch.Tensor, logits: torch.Tensor
) -> bool:
    """Whether the same tokens at the same positions have other logits if the cache reports another length."""
    for length in PROBE_LENGTHS:
        cross = None if info.source_positions is None else RecordingCross(torch.zeros(ROWS, dtype=torch.int64))
        run = Running(RecordingCache(length), positions, MaskLog(), cross)
        try:
            shifted = _logits(model, info, route, run)
        except Exception:
            # The same forward ran when the cache reported 0, so the failure depends on the length (a look-up after the
            # end of a table, for example). No error is hidden: the capture check becomes stricter.
            return True
        if not torch.equal(shifted, logits):
            return True
    return False


def extra_inputs(
    model: PreTrainedModel,
    route: Route,
    positions: torch.Tensor,
    cache_len: int | torch.SymInt | None,
    rope_positions: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the inputs of a forward beside tokens and cache: positions ``[B, T]``, or ``rope_positions``
    ``[PARTS, B, T]`` if the model's have parts, and for the model's own attention a mask ``[B, S]``.

    Models with recurrent layers would use the mask as padding of their inputs: pass ``cache_len=None`` for them.
    """
    given = rope_positions if has_parts(model) else positions
    inputs = {"position_ids": given} if accepts(model, "position_ids") else {}
    if route == "eager" and cache_len is not None and accepts(model, "attention_mask"):
        ones = torch.ones((positions.shape[0], cache_len), dtype=torch.int64, device=positions.device)
        inputs["attention_mask"] = ones
    return inputs


def _no_cache(model: PreTrainedModel) -> str:
    return f"{_first_layer(model)} {RECURRENT}" if model._is_stateful else "it keeps no KV cache"


def _first_layer(model: PreTrainedModel) -> str:
    path, layers = decoder_layers(model)
    return f"{path}.0 ({type(layers[0]).__name__})"


class ModuleTracker:
    """The module that currently runs, for error messages."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stack: list[tuple[str, str]] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Track the stack of modules while they run. A module that raised stays on the stack."""
        handles = []
        for path, module in self._model.named_modules():
            entry = (path, type(module).__name__)
            handles.append(module.register_forward_pre_hook(lambda *_, entry=entry: self._stack.append(entry)))
            handles.append(module.register_forward_hook(lambda *_: self._leave()))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:
        self._stack.pop()

    def __str__(self) -> str:
        if not self._stack or not self._stack[-1][0]:
            return "it "
        path, kind = self._stack[-1]
        return f"{path} ({kind}) "
