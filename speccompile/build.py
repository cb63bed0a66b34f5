"""From a model and a mode to tiers: capture, passes, lowering, binding."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import (
    CaptureError,
    CaptureMismatch,
    ConsumeUnavailable,
    DeterministicUnavailable,
    PassError,
    UnsupportedModel,
)
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.check import Probe, check_capture
from speccompile.graph_capture.graph import Route, StepGraph
from speccompile.graph_capture.observe import Observation, observe
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.store import CaptureStore
from speccompile.graph_capture.support import ModelInfo
from speccompile.lowering.backends import Eager
from speccompile.lowering.cpu.consume import ConsumedWeights
from speccompile.lowering.cpu.packing import WeightPacks
from speccompile.lowering.determinism import corners, everywhere, prove_deterministic
from speccompile.lowering.kernels import STOCK
from speccompile.lowering.tier import ChunkKind, Executables, Kind, PrefillName, Tier, TierKey, TierName, bind
from speccompile.lowering.workers import release_workers
from speccompile.passes.pipeline import Stage, Stages
from speccompile.pipelines import (
    BuildConfig,
    model_pipeline,
    plan_layout,
    prefill_name,
    prefill_pipeline,
    prefill_widths,
    tier_name,
    tier_pipeline,
)
from speccompile.progress import task
from speccompile.runtime.arena import Arena


@dataclass
class Build:
    """Everything that a wrap made, and the seconds it took.

    Args:
        config: what was asked for, as it could be had.
        weights: the model's own, by path; consumed ones as they are now.
        executables: those of ``BuildConfig.kind``.
        make: makes those of another kind.
    """

    config: BuildConfig
    info: ModelInfo
    observed: Observation
    arena: Arena
    weights: Mapping[str, torch.Tensor]
    packs: WeightPacks
    executables: Executables
    make: Callable[[Kind], Executables]
    capture_difference: float
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> Tier:
        """The tier of the largest draft length and most rows."""
        return self.executables.tiers[max(self.executables.tiers)]


def build_stages(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    *,
    stored: bool = True,
    routes: Sequence[Route] = ROUTES,
    kind: Kind | None = None,
    consumed: ConsumedWeights | None = None,
) -> BuiltStages:
    """Capture (or read a stored capture, if ``stored``) and run all passes; nothing is lowered or checked.

    ``kind`` None is ``config.kind``. ``consumed`` takes the weights that are packed.
    """
    started = time.perf_counter()
    if consumed is not None:
        # An attempt before this one may have taken them.
        consumed.undo()
    settle_rotary(model)
    known = CaptureStore(model, info).load() if stored else None
    if known is not None and not known.fits(plan_layout(info, config, known.observed.kv)):
        known = None
    if known is None:
        with task("capture the model"):
            observed = observe(model, info, routes)
            arena = Arena(plan_layout(info, config, observed.kv), info.device)
            captured = capture(model, info, observed, arena.layout)
    else:
        observed = known.observed
        arena = Arena(plan_layout(info, config, observed.kv), info.device)
        captured = known.graph(arena.layout)
    captured.logits_processors = config.logits_processors
    config = replace(config, route=observed.route)
    probe = None
    if consumed is not None:
        # Now the model still reads its own weights. Unpacked ones take time, and room for the largest of them.
        probe = Probe.of(model, info, arena, _reach(observed, arena))
        consumed.release_unread()
    packs = WeightPacks(consumed)
    note = "exported" if known is None else "read from the store"
    first = Stage("capture", "the captured model", captured.copy(), time.perf_counter() - started, note)
    with task("run the passes"):
        _, model_stages = model_pipeline(config, packs).run(captured, first)
        tiers, prefill = _stages_of_kind(config, model_stages, config.kind if kind is None else kind)
    from_store = known is not None
    return BuiltStages(config, observed, arena, packs, model_stages, tiers, prefill, from_store, probe)


def _stages_of_kind(
    config: BuildConfig, model: Stages, kind: Kind
) -> tuple[dict[TierName, Stages], dict[PrefillName, Stages]]:
    outlined = model.last.graph
    tiers, prefill = {}, {}
    for draft_len, rows in itertools.product(config.tiers, config.row_counts):
        _, stages = tier_pipeline(config, draft_len, rows, kind).run(outlined, model.last)
        tiers[draft_len, rows, kind] = model.followed_by(stages)
    widths = prefill_widths(config.max_len)
    chunks: list[PrefillName] = [(width, kind) for width in widths]
    if kind == config.kind:
        # Inner chunks choose no token: they are made once, for all kinds. Another one follows, so none fills a text.
        chunks += [(width, "inner") for width in widths if width < config.max_len - 1]
    elif kind == "scored":
        chunks += [(width, "prompt_scored") for width in widths]
    for chunk in chunks:
        _, stages = prefill_pipeline(config, *chunk).run(outlined, model.last)
        prefill[chunk] = model.followed_by(stages)
    return tiers, prefill


@dataclass
class BuiltStages:
    """What was observed, the arena, and what the passes left: of the model, of each tier, of each prefill chunk.

    ``probe`` is what the capture check needs of a model whose weights were consumed.
    """

    config: BuildConfig
    observed: Observation
    arena: Arena
    packs: WeightPacks
    model: Stages
    tiers: dict[TierName, Stages]
    prefill: dict[PrefillName, Stages]
    from_store: bool
    probe: Probe | None


def build(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, consumed: ConsumedWeights | None = None
) -> Build:
    """Make all executables of a wrap; ``consumed`` takes the weights that are packed.

    Raises:
        CaptureError, CaptureMismatch, PassError, LoweringError, DeterministicUnavailable, ConsumeUnavailable.
    """
    clock = _Clock()
    stages, lowered, difference = _checked_stages(model, info, config, clock, consumed)
    if stages.config.keeps_bits:
        try:
            _prove(stages, lowered, clock)
        except DeterministicUnavailable as unavailable:
            # Some op between ours does not keep the order of sums.
            if stages.config.one_shape:
                raise
            if not config.deterministic:
                stages.config = replace(stages.config, deterministic=False)
            elif consumed is not None:
                reason = "deterministic=True needs torch's own linears for this model, which read unpacked weights"
                raise ConsumeUnavailable(reason=reason, advice=" or deterministic=None") from unavailable
            else:
                config = replace(config, kernels=STOCK)
                stages, lowered, difference = _checked_stages(model, info, config, clock, consumed)
                _prove(stages, lowered, clock)
    config, arena = stages.config, stages.arena
    with clock.time("binding"):
        executables = _executables(config, arena, stages.tiers, stages.prefill)
    if info.device.type == "cpu":
        # Another thread may run the steps.
        release_workers()

    def make(kind: Kind) -> Executables:
        with task(f"build the {kind} steps"):
            return _executables(config, arena, *_stages_of_kind(config, stages.model, kind))

    return Build(
        config,
        info,
        stages.observed,
        arena,
        _weights(stages.model["capture"].graph) | (consumed.tensors() if consumed else {}),
        stages.packs,
        executables,
        make,
        difference,
        clock.seconds,
    )


def _weights(captured: StepGraph) -> dict[str, torch.Tensor]:
    ports = captured.ports.values()
    return {port.path: port.value for port in ports if port.path and not port.own and port.value is not None}


def _prove(stages: BuiltStages, lowered: Callable[..., Any], clock: _Clock) -> None:
    config = stages.config
    with task("prove that results do not depend on the tier"), clock.time("determinism proof"):
        prove_deterministic(
            stages.model.last.graph,
            stages.model["choose_linear"].graph,
            lowered,
            stages.arena,
            everywhere(config.max_batch, config.max_width)
            if config.one_shape
            else corners(config.max_batch, config.max_width),
        )


def _checked_stages(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    clock: _Clock,
    consumed: ConsumedWeights | None,
) -> tuple[BuiltStages, Callable[..., Any], float]:
    """Stages, the lowered outlined model, and the largest difference that its capture check saw.

    A stored capture that does not pass is captured again, and a model that does not compute the same by the attention
    op is captured with its own attention.
    """

    def fresh(routes: Sequence[Route] = ROUTES) -> BuiltStages:
        with clock.time("capture and passes"):
            return build_stages(model, info, config, stored=False, routes=routes, consumed=consumed)

    settle_rotary(model)
    # Made here, while the model still is what its key tells.
    store = CaptureStore(model, info)
    try:
        with clock.time("capture and passes"):
            stages = build_stages(model, info, config, consumed=consumed)
    except (PassError, RuntimeError):
        # A stored graph may not bear the sizes of this wrap.
        if not store.path.exists():
            raise
        stages = fresh()
    if stages.from_store:
        try:
            return stages, *_checked(model, info, config, clock, stages)
        except CaptureMismatch:
            stages = fresh()
    try:
        checked = _checked(model, info, config, clock, stages)
    except CaptureMismatch as mismatch:
        others = ROUTES[ROUTES.index(stages.observed.route) + 1 :]
        if not others:
            raise
        try:
            stages = fresh(others)
            checked = _checked(model, info, config, clock, stages)
        except (UnsupportedModel, CaptureError):
            raise mismatch from None
        reason = "its attention is not what the attention op computes: the capture check saw a difference"
        stages.observed = replace(stages.observed, reason=reason)
    store.save(stages.model["capture"].graph, stages.observed)
    return stages, *checked


def _checked(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, clock: _Clock, stages: BuiltStages
) -> tuple[Callable[..., Any], float]:
    outlined = stages.model.last.graph
    with clock.time("compile"):
        lowered = config.backend.lower(outlined, "the captured model")

    def reference(graph: StepGraph) -> Callable[..., Any]:
        return Eager("reference").lower(graph, "the captured model")

    reach = _reach(stages.observed, stages.arena)
    with task("check the captured graph against the model"), clock.time("capture check"):
        difference = check_capture(model, info, outlined, stages.arena, lowered, reference, reach, stages.probe)
    return lowered, difference


def _reach(observed: Observation, arena: Arena) -> int:
    """How far back a token may look, for a text that is to be longer."""
    return arena.layout.max_len if observed.counts else observed.reach


class _Clock:
    """Seconds by name of the work, added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def _executables(
    config: BuildConfig, arena: Arena, tiers: dict[TierName, Stages], prefill: dict[PrefillName, Stages]
) -> Executables:
    return Executables(
        {name: _tier(config, arena, tier_name(*name), name[0], name[2], its) for name, its in tiers.items()},
        {chunk: _tier(config, arena, prefill_name(*chunk), 0, chunk[1], its) for chunk, its in prefill.items()},
    )


def _tier(config: BuildConfig, arena: Arena, name: str, draft_len: int, kind: ChunkKind, stages: Stages) -> Tier:
    graph = stages.last.graph
    names, tensors = bind(graph, arena)
    arena.record_call(name, names, tensors)
    key = TierKey(graph.sizes["B"], graph.sizes["T"], kind)
    return Tier(name, key, draft_len, stages, config.backend.lower(graph, name), names, tensors, arena)
