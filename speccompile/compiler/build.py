"""From a model and a mode to tiers: capture, passes, lowering, binding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import NoneType

import torch
from transformers import PreTrainedModel

from speccompile.compiler.attempts import Attempt, first_that_passes
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.drafter import Drafter
from speccompile.compiler.executables import ExecutableMaker
from speccompile.compiler.seconds import Seconds
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind, TierName
from speccompile.graph.stage import CAPTURE, Stages
from speccompile.graph_capture.model_info import ModelInfo, named_tensors
from speccompile.graph_capture.observe import Observation
from speccompile.graph_capture.store import CaptureStore, capture_file
from speccompile.hidden_states.target_id import target_id
from speccompile.lowering.backends import Backend, Eager, Inductor, ask
from speccompile.lowering.cuda.captures import Captures
from speccompile.lowering.recorded_step import RecordedStep, StepMemory, recorded_function
from speccompile.lowering.tier import Executables, Tier
from speccompile.ops.cpu.free_originals import FreedOriginals
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.outcomes import pack
from speccompile.utils.build_lock import one_build
from speccompile.utils.collector import rare_collections
from speccompile.utils.devices import traits_of
from speccompile.utils.storage import CacheFolder, Collected, Storage
from speccompile.utils.workers import release_workers


@dataclass
class Build:
    """Everything that a wrap built, and the seconds of each part.

    ``make`` builds the executables of another kind. ``make_mixed`` builds the mixed tiers of a kind; they are empty if
    prompts cannot be processed in decode steps.

    Args:
        config: the requested options, with those that the build decided.
        weights: the model's weights, by path; freed weights in their packed form.
        constants: the other tensors of modules and hooks that its steps read.
        model: the stages of the model, from which all executables start.
        executables: those of ``BuildConfig.kind``.
        captures: the CUDA graphs, or None.
        drafter: the mode's own network, or None.
        pack: :func:`speccompile.runtime.outcomes.pack` of the arena, as a CUDA graph if ``captures`` are used, recorded
            if steps are.
        step_memory: of the recorded steps.
        target_id: of the weights before they were rounded; None if the model still has them.
    """

    config: BuildConfig
    info: ModelInfo
    observed: Observation
    arena: Arena
    weights: Mapping[str, torch.Tensor]
    constants: Sequence[torch.Tensor]
    packs: WeightPacks
    model: Stages
    executables: Executables
    make: Callable[[Kind], Executables]
    make_mixed: Callable[[Kind], Mapping[TierName, Tier]]
    capture_difference: float
    captures: Captures | None
    pack: Callable[[], torch.Tensor]
    step_memory: StepMemory
    drafter: Drafter | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    target_id: str | None = None

    @property
    def largest(self) -> Tier:
        """The tier of the largest draft length and most rows."""
        return self.executables.tiers[max(self.executables.tiers)]


@rare_collections()
def build(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    storage: Storage | None = None,
    freed: FreedOriginals | None = None,
) -> Build:
    """Build all executables of a wrap.

    Args:
        storage: of captures, finished steps and compiled bodies; None is the cache folder.
        freed: receives the packed weights; None leaves the model's own in place.

    Raises:
        CaptureError, CaptureMismatch, PassError, LoweringError, DeterministicUnavailable, FreeOriginalsUnavailable.
    """
    seconds = Seconds()
    storage = CacheFolder() if storage is None else storage
    backend = config.backend
    backend = ask(backend, "take a storage", lambda: backend.with_storage(storage), (Eager, Inductor))
    ask(backend, "prepare", lambda: backend.prepare(info.device), object)
    config = replace(config, backend=backend)
    checked = first_that_passes(model, info, Attempt(config, freed=freed), storage, seconds)
    stages = checked.stages
    config, arena, outlined = stages.config, stages.arena, stages.model.last.graph
    weights = partial(named_tensors, model)
    kinds = (Captures, NoneType)
    captures = ask(backend, "return what captures its steps", lambda: backend.captures(arena, weights), kinds)
    maker = ExecutableMaker(config, arena, outlined, stages.maker, captures)
    with seconds.of("binding" if captures is None else "CUDA graphs"):
        executables = maker.of_steps(stages.tiers, stages.prefill)
        pack_arena: Callable[[], torch.Tensor] = partial(pack, arena)
        if captures is not None:
            pack_arena = captures.function(pack_arena)
        elif any(isinstance(tier.executable, RecordedStep) for tier in executables.tiers.values()):
            pack_arena = recorded_function(pack_arena)
    make: Callable[[Kind], Executables] = maker.of_kind
    make_mixed: Callable[[Kind], Mapping[TierName, Tier]] = maker.mixed
    if config.ranks is not None:
        make = config.ranks.on_all("the build of steps", make)
        make_mixed = config.ranks.on_all("the build of mixed steps", make_mixed)
        config.ranks.take(arena)
    if traits_of(info.device).host_memory:
        # Another thread may run the steps, with its own workers.
        release_workers()
    identity = None
    if freed is not None and config.weights.rounds:
        identity = target_id(model, config.target_form)
        stages.packs.replace_rounded_originals()
    return Build(
        config,
        info,
        stages.observed,
        arena,
        stages.model[CAPTURE].graph.weights | (freed.tensors() if freed else {}),
        stages.model[CAPTURE].graph.constants,
        stages.packs,
        stages.model,
        executables,
        make,
        make_mixed,
        checked.difference,
        captures,
        pack_arena,
        maker.step_memory,
        stages.drafter,
        seconds.by_name,
        identity,
    )


@one_build()
def saved_files(model: PreTrainedModel, build: Build, backend: Backend, tiers: Iterable[Tier]) -> dict[str, bytes]:
    """The files that the same build would read from its storage, by name."""
    outlined = build.model.last.graph
    capture_name = CaptureStore(model, build.info, CacheFolder(), build.config.kv).name
    finished = [step for tier in tiers for step in (tier.step, tier.step.drafter) if step is not None]
    steps = {step.name: step.file() for step in finished if step.name is not None}
    collected = Collected()
    if build.drafter is not None:
        build.drafter.network.store(build.drafter.captured, collected)
    captured = {capture_name: capture_file(build.model["capture"].graph, build.observed)}
    return {**collected.files, **captured, **steps, **backend.compiled_files(outlined)}
