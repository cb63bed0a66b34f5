"""From a model and a mode to tiers: capture, passes, lowering, binding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from speccompile.errors import CaptureError, CaptureMismatch, PassError, UnsupportedModel
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.check import check_capture
from speccompile.graph_capture.graph import Route, StepGraph
from speccompile.graph_capture.observe import Observation, observe
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.state import KVShape, Layout, core_state, kv_state, resolve_layout
from speccompile.graph_capture.store import CaptureStore
from speccompile.graph_capture.support import ModelInfo
from speccompile.lowering.backends import Backend, Eager
from speccompile.lowering.determinism import prove_deterministic
from speccompile.lowering.linears import STOCK, LinearChoice
from speccompile.lowering.tier import Tier, TierKey, bind
from speccompile.modes.base import Mode
from speccompile.passes.base import Facts, Pass, facts
from speccompile.passes.bound_positions import BoundPositions
from speccompile.passes.choose_attention import ChooseAttention, KeepAttention
from speccompile.passes.choose_linear import ChooseLinear
from speccompile.passes.commit import Commit
from speccompile.passes.drafts import NoDrafts
from speccompile.passes.greedy_accept import GreedyAccept
from speccompile.passes.last_logits import LastLogits
from speccompile.passes.outline import OutlineLayers
from speccompile.passes.pipeline import Pipeline, Stage, Stages
from speccompile.passes.rows import BindRows
from speccompile.passes.verify_inputs import PrefillInputs, VerifyInputs
from speccompile.progress import task
from speccompile.runtime.arena import Arena

PREFILL_WIDTHS = (8, 32, 64, 128, 512)


@dataclass(frozen=True)
class BuildConfig:
    """What ``wrap`` was asked for, checked."""

    mode: Mode
    tiers: tuple[int, ...]
    max_batch: int
    max_len: int
    backend: Backend
    deterministic: bool
    linears: LinearChoice = STOCK

    @property
    def max_draft_len(self) -> int:
        return max(self.tiers)

    def width(self, draft_len: int) -> int:
        """What the target computes in a step of a tier, at least K+1; with ``deterministic`` all run one shape."""
        width = self.max_draft_len + 1 if self.deterministic else draft_len + 1
        # One column would make a weight-stationary linear a matrix-vector product, which is slower than two.
        alone = self.linears.weight_stationary and self.max_batch * width == 1
        return 2 if alone else width

    def draft_passes(self, draft_len: int) -> list[Pass]:
        """What the mode puts into a tier."""
        drafts = self.mode.draft_passes(draft_len) if draft_len else [NoDrafts()]
        return [*drafts, *self.commit_passes()]

    def commit_passes(self) -> list[Pass]:
        """What the mode does behind a commit; nothing where no tier could use it."""
        return self.mode.commit_passes() if self.max_draft_len else []

    @property
    def goals(self) -> Facts:
        """Facts that hold in every finished step."""
        return facts("committed") | (self.mode.goals if self.max_draft_len else facts())

    @property
    def max_width(self) -> int:
        return max(self.width(draft_len) for draft_len in self.tiers)


@dataclass
class Build:
    """Everything that a wrap made, and the seconds it took."""

    info: ModelInfo
    observed: Observation
    arena: Arena
    tiers: dict[int, Tier]
    prefill: dict[int, Tier]
    capture_difference: float
    seconds: dict[str, float] = field(default_factory=dict)


def model_pipeline(config: BuildConfig, route: Route) -> Pipeline:
    """Passes over the captured model alone; all tiers start from what they leave."""
    passes = (
        BoundPositions(),
        ChooseAttention(config.deterministic) if route == "attention" else KeepAttention(),
        ChooseLinear(config.linears.weight_stationary),
        OutlineLayers(),
    )
    return Pipeline(passes, facts("outlined"), "the captured model")


def tier_pipeline(config: BuildConfig, draft_len: int) -> Pipeline:
    """Passes that make the step of one tier out of the outlined model."""
    passes: list[Pass] = [
        BindRows(),
        *config.draft_passes(draft_len),
        VerifyInputs(draft_len, config.width(draft_len)),
        GreedyAccept(),
        Commit(),
    ]
    return Pipeline(tuple(passes), config.goals, f"tier K={draft_len}")


def prefill_pipeline(config: BuildConfig, width: int) -> Pipeline:
    """Passes that make a prefill chunk of ``width`` tokens out of the outlined model."""
    passes: list[Pass] = [
        BindRows("prefill_slot"),
        NoDrafts(),
        PrefillInputs(width),
        LastLogits(),
        GreedyAccept(),
        Commit(),
        *config.commit_passes(),
    ]
    return Pipeline(tuple(passes), config.goals, f"prefill T={width}")


def prefill_widths(max_len: int) -> tuple[int, ...]:
    """Chunk widths worth having for prompts shorter than ``max_len``."""
    return tuple(width for width in PREFILL_WIDTHS if width == PREFILL_WIDTHS[0] or width <= max_len)


def plan_layout(info: ModelInfo, config: BuildConfig, kv: Mapping[int, KVShape]) -> Layout:
    """All state tensors of the wrap, with their sizes."""
    return resolve_layout(
        [*core_state(info.vocab_size), *config.mode.state(), *kv_state(kv)],
        max_batch=config.max_batch,
        max_len=config.max_len,
        max_draft_len=config.max_draft_len,
        max_width=config.max_width,
        vocab_size=info.vocab_size,
    )


def build_stages(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    *,
    stored: bool = True,
    routes: Sequence[Route] = ROUTES,
) -> BuiltStages:
    """Capture (or read a stored capture, if ``stored``) and run all passes; nothing is lowered or checked."""
    started = time.perf_counter()
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
    note = "exported" if known is None else "read from the store"
    first = Stage("capture", "the captured model", captured.copy(), time.perf_counter() - started, note)
    with task("run the passes"):
        outlined, model_stages = model_pipeline(config, observed.route).run(captured, first)
        tiers, prefill = {}, {}
        for draft_len in config.tiers:
            _, stages = tier_pipeline(config, draft_len).run(outlined, model_stages.last)
            tiers[draft_len] = model_stages.followed_by(stages)
        for width in prefill_widths(config.max_len):
            _, stages = prefill_pipeline(config, width).run(outlined, model_stages.last)
            prefill[width] = model_stages.followed_by(stages)
    return BuiltStages(observed, arena, model_stages, tiers, prefill, from_store=known is not None)


@dataclass
class BuiltStages:
    """What was observed, the arena, and what the passes left: of the model, of each tier, of each prefill width."""

    observed: Observation
    arena: Arena
    model: Stages
    tiers: dict[int, Stages]
    prefill: dict[int, Stages]
    from_store: bool


def build(model: PreTrainedModel, info: ModelInfo, config: BuildConfig) -> Build:
    """Make all executables of a wrap.

    Raises:
        CaptureError, CaptureMismatch, PassError, LoweringError, DeterministicUnavailable.
    """
    clock = _Clock()
    stages, lowered, difference = _checked_stages(model, info, config, clock)
    arena = stages.arena
    with clock.time("binding"):
        tiers = {k: _tier(config, arena, f"tier K={k}", k, s) for k, s in stages.tiers.items()}
        prefill = {w: _tier(config, arena, f"prefill T={w}", 0, s) for w, s in stages.prefill.items()}
    if config.deterministic:
        with task("prove that results do not depend on the tier"), clock.time("determinism proof"):
            flat = stages.model["choose_linear"].graph
            prove_deterministic(stages.model.last.graph, flat, lowered, arena, config.width(0))
    return Build(info, stages.observed, arena, tiers, prefill, difference, clock.seconds)


def _checked_stages(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, clock: _Clock
) -> tuple[BuiltStages, Callable[..., Any], float]:
    """Stages, the lowered outlined model, and the largest difference that its capture check saw.

    A stored capture that does not pass is captured again, and a model that does not compute the same by the attention
    op is captured with its own attention.
    """

    def fresh(routes: Sequence[Route] = ROUTES) -> BuiltStages:
        with clock.time("capture and passes"):
            return build_stages(model, info, config, stored=False, routes=routes)

    try:
        with clock.time("capture and passes"):
            stages = build_stages(model, info, config)
    except (PassError, RuntimeError):
        # A stored graph may not bear the sizes of this wrap.
        if not CaptureStore(model, info).path.exists():
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
    CaptureStore(model, info).save(stages.model["capture"].graph, stages.observed)
    return stages, *checked


def _checked(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, clock: _Clock, stages: BuiltStages
) -> tuple[Callable[..., Any], float]:
    outlined = stages.model.last.graph
    with clock.time("compile"):
        lowered = config.backend.lower(outlined, "the captured model")

    def reference(graph: StepGraph) -> Callable[..., Any]:
        return Eager("reference").lower(graph, "the captured model")

    reach = stages.arena.layout.max_len if stages.observed.counts else stages.observed.reach
    with task("check the captured graph against the model"), clock.time("capture check"):
        difference = check_capture(model, info, outlined, stages.arena, lowered, reference, reach)
    return lowered, difference


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


def _tier(config: BuildConfig, arena: Arena, name: str, draft_len: int, stages: Stages) -> Tier:
    graph = stages.last.graph
    names, tensors = bind(graph, arena)
    arena.record_call(name, names, tensors)
    key = TierKey(graph.sizes["B"], graph.sizes["T"])
    return Tier(name, key, draft_len, stages, config.backend.lower(graph, name), names, tensors, arena)
