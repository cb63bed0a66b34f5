"""From a model and a mode to tiers: capture, passes, lowering, binding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.compiler.determinism import corners, everywhere, prove_deterministic
from speccompile.compiler.drafter import Drafter
from speccompile.compiler.executables import ExecutableMaker
from speccompile.compiler.frontend import BuiltStages, build_stages, reach_of
from speccompile.compiler.pipelines import (
    BuildConfig,
)
from speccompile.errors import (
    CaptureError,
    CaptureMismatch,
    ConsumeUnavailable,
    DeterministicUnavailable,
    LoweringError,
    PassError,
    UnsupportedModel,
)
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind, TierName
from speccompile.graph.stage import Stages
from speccompile.graph.step_graph import Route, StepGraph
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.check import Probe, check_capture
from speccompile.graph_capture.model_info import ModelInfo, named_tensors
from speccompile.graph_capture.observe import Observation
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.store import CaptureStore, capture_file
from speccompile.lowering.backends import Backend, Eager
from speccompile.lowering.cuda.captures import Captures
from speccompile.lowering.kernels import STOCK, Kernels
from speccompile.lowering.tier import Executables, Tier
from speccompile.ops.cpu.consume import ConsumedWeights
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.ops.cpu.rounded import check_kernels, inputs_unrounded
from speccompile.runtime.outcomes import pack
from speccompile.utils.build_lock import one_build
from speccompile.utils.progress import task
from speccompile.utils.storage import CacheFolder, Collected, Storage
from speccompile.utils.workers import release_workers


@dataclass
class Build:
    """Everything that a wrap made, and the seconds it took.

    Args:
        config: what was asked for, as it could be had.
        weights: the model's own, by path; consumed ones as they are now.
        model: stages of the model alone, which all executables start from.
        executables: those of ``BuildConfig.kind``.
        make: makes those of another kind.
        make_mixed: makes the mixed tiers of a kind: none where prompts cannot be read along.
        captures: the CUDA graphs, None if there are none.
        drafter: the mode's own network, None if there is none.
        pack: :func:`speccompile.runtime.outcomes.pack` of the arena, as a graph if there are graphs.
    """

    config: BuildConfig
    info: ModelInfo
    observed: Observation
    arena: Arena
    weights: Mapping[str, torch.Tensor]
    packs: WeightPacks
    model: Stages
    executables: Executables
    make: Callable[[Kind], Executables]
    make_mixed: Callable[[Kind], Mapping[TierName, Tier]]
    capture_difference: float
    captures: Captures | None
    pack: Callable[[], torch.Tensor]
    drafter: Drafter | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> Tier:
        """The tier of the largest draft length and most rows."""
        return self.executables.tiers[max(self.executables.tiers)]


def build(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    storage: Storage | None = None,
    consumed: ConsumedWeights | None = None,
) -> Build:
    """Make all executables of a wrap; ``consumed`` takes the weights that are packed.

    Args:
        storage: of captures, finished steps and compiled bodies; None is the cache folder.

    Raises:
        CaptureError, CaptureMismatch, PassError, LoweringError, DeterministicUnavailable, ConsumeUnavailable.
    """
    clock = _Clock()
    storage = CacheFolder() if storage is None else storage
    config = replace(config, backend=config.backend.with_storage(storage))
    config.backend.prepare(info.device)
    try:
        stages, lowered, difference = _checked_stages(model, info, config, clock, storage, consumed)
    except _OtherKernels as other:
        config = replace(config, kernels=other.kernels)
        stages, lowered, difference = _checked_stages(model, info, config, clock, storage, consumed)
    if stages.config.keeps_bits:
        try:
            _prove(stages, lowered, clock)
        except DeterministicUnavailable as unavailable:
            # Some op between ours does not keep the order of sums.
            if stages.config.one_shape or (config.deterministic and config.weights != "same"):
                raise
            if not config.deterministic:
                stages.config = replace(stages.config, deterministic=False)
            elif consumed is not None:
                reason = "deterministic=True needs torch's own linears for this model, which read unpacked weights"
                raise ConsumeUnavailable(reason=reason, advice=" or deterministic=None") from unavailable
            else:
                config = replace(config, kernels=STOCK)
                stages, lowered, difference = _checked_stages(model, info, config, clock, storage)
                _prove(stages, lowered, clock)
    config, arena, outlined = stages.config, stages.arena, stages.model.last.graph
    captures = config.backend.captures(arena, partial(named_tensors, model))
    maker = ExecutableMaker(config, arena, outlined, stages.maker, captures)
    with clock.time("binding" if captures is None else "CUDA graphs"):
        executables = maker.of_steps(stages.tiers, stages.prefill)
        pack_arena: Callable[[], torch.Tensor] = partial(pack, arena)
        if captures is not None:
            pack_arena = captures.function(pack_arena)
    if info.device.type == "cpu":
        # Another thread may run the steps.
        release_workers()
    return Build(
        config,
        info,
        stages.observed,
        arena,
        stages.model["capture"].graph.weights | (consumed.tensors() if consumed else {}),
        stages.packs,
        stages.model,
        executables,
        maker.of_kind,
        maker.mixed,
        difference,
        captures,
        pack_arena,
        stages.drafter,
        clock.seconds,
    )


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
    storage: Storage,
    consumed: ConsumedWeights | None = None,
) -> tuple[BuiltStages, Callable[..., Any], float]:
    """Stages, the lowered outlined model, and the largest difference that its capture check saw.

    A stored capture that does not pass is captured again, and a model that does not compute the same by the attention
    op is captured with its own attention.
    """

    def fresh(routes: Sequence[Route] = ROUTES) -> BuiltStages:
        with clock.time("capture and passes"):
            return build_stages(model, info, config, stored=False, routes=routes, storage=storage, consumed=consumed)

    settle_rotary(model)
    # Made here, while the model still is what its key tells.
    store = CaptureStore(model, info, storage)
    try:
        with clock.time("capture and passes"):
            stages = build_stages(model, info, config, storage=storage, consumed=consumed)
    except (PassError, RuntimeError):
        # A stored graph may not bear the sizes of this wrap.
        if store.load() is None and config.network is None:
            raise
        stages = fresh()
    if stages.from_store:
        try:
            checked = _checked(model, info, config, clock, stages)
        except CaptureMismatch:
            stages = fresh()
        else:
            # The target's capture may have been read, and the drafter's made.
            _keep_drafter(stages, storage)
            return stages, *checked
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
    _keep_drafter(stages, storage)
    return stages, *checked


def _keep_drafter(stages: BuiltStages, storage: Storage) -> None:
    drafter = stages.drafter
    if drafter is not None and not drafter.from_store:
        drafter.network.keep(drafter.captured, storage)


def _checked(
    model: PreTrainedModel, info: ModelInfo, config: BuildConfig, clock: _Clock, stages: BuiltStages
) -> tuple[Callable[..., Any], float]:
    outlined = stages.model.last.graph
    with clock.time("compile"):
        try:
            lowered = config.backend.lower(outlined, "the captured model")
        except LoweringError:
            # What is compiled is linked with the C++ ops, which are built meanwhile and may not come about.
            _settle(config)
            raise
        _settle(config)

    def reference(graph: StepGraph) -> Callable[..., Any]:
        return Eager("reference").lower(graph, "the captured model")

    reach = reach_of(stages.observed, stages.arena)
    with (
        task("check the captured graph against the model"),
        clock.time("capture check"),
        inputs_unrounded(stages.packs),
    ):
        probe = stages.probe or Probe.of(model, info, stages.arena, reach)
        difference = check_capture(model, info, outlined, stages.arena, lowered, reference, reach, probe)
    check_kernels(stages.packs)
    if stages.drafter is not None:
        with clock.time("capture check"):
            stages.drafter.check(config, stages.arena)
    return lowered, difference


@one_build()
def saved_files(model: PreTrainedModel, build: Build, backend: Backend, tiers: Iterable[Tier]) -> dict[str, bytes]:
    """What a build of the same would read from its storage, by name."""
    outlined = build.model.last.graph
    capture_name = CaptureStore(model, build.info, CacheFolder()).name
    finished = [step for tier in tiers for step in (tier.step, tier.step.drafter) if step is not None]
    steps = {step.name: step.file() for step in finished if step.name is not None}
    collected = Collected()
    if build.drafter is not None:
        build.drafter.network.keep(build.drafter.captured, collected)
    captured = {capture_name: capture_file(build.model["capture"].graph, build.observed)}
    return {**collected.files, **captured, **steps, **backend.compiled_files(outlined)}


def _settle(config: BuildConfig) -> None:
    kernels = config.kernels.settled()
    if kernels.native != config.kernels.native:
        raise _OtherKernels(kernels)


class _OtherKernels(Exception):
    """What was being built beside the capture could not be built."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels.reason)
        self.kernels = kernels


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
