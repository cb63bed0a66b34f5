"""The stages of a wrap: the captured model, and the graph after each pass, before lowering."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from speccompile.compiler.capabilities import target_refusal
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.default_pool import check_pool_suits
from speccompile.compiler.drafter import Drafter, attach, make_drafter
from speccompile.compiler.executables import steps_of_kind
from speccompile.compiler.layout import plan_layout
from speccompile.compiler.memory import check_device_memory
from speccompile.compiler.pipelines import model_pipeline
from speccompile.compiler.step_store import StepMaker
from speccompile.errors import InvalidOption, InvalidTiers
from speccompile.graph.arena import Arena
from speccompile.graph.finished import FinishedStep
from speccompile.graph.keys import Kind, PrefillName, TierName
from speccompile.graph.stage import CAPTURE, Stage, Stages
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.attention import ROUTES
from speccompile.graph_capture.capture import capture
from speccompile.graph_capture.check import Probe
from speccompile.graph_capture.model_info import ModelInfo, all_names
from speccompile.graph_capture.observe import Observation, observe
from speccompile.graph_capture.packed_forward import reading_packs
from speccompile.graph_capture.rope_positions import reads_parts
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.graph_capture.store import CaptureStore
from speccompile.ops.cpu.free_originals import FreedOriginals
from speccompile.ops.cpu.packing import Pack, WeightPacks
from speccompile.ops.kv_rows import GROUP
from speccompile.passes.target.choose_experts import has_experts
from speccompile.runtime.target import addresses_in_use
from speccompile.utils.joined_weights import JoinedWeights
from speccompile.utils.progress import task
from speccompile.utils.storage import CacheFolder, Storage
from speccompile.utils.tracer_isolation import copy_over_same_tensors


@dataclass
class BuiltStages:
    """The observation, the arena, and the stages: of the model, each tier, each prefill chunk, and the drafter.

    Args:
        probe: the model's own results, for the capture check of a model whose weights are freed while they are
            packed.
    """

    config: BuildConfig
    observed: Observation
    arena: Arena
    packs: WeightPacks
    model: Stages
    maker: StepMaker
    tiers: dict[TierName, FinishedStep]
    prefill: dict[PrefillName, FinishedStep]
    from_store: bool
    probe: Probe | None
    drafter: Drafter | None


def build_stages(
    model: PreTrainedModel,
    info: ModelInfo,
    config: BuildConfig,
    *,
    stored: bool = True,
    routes: Sequence[Route] = ROUTES,
    kind: Kind | None = None,
    storage: Storage | None = None,
    freed: FreedOriginals | None = None,
    packed: Callable[[str, Pack], None] | None = None,
) -> BuiltStages:
    """Capture (or read a stored capture, if ``stored``) and run all passes; nothing is lowered or checked.

    ``kind`` None is ``config.kind``; ``storage`` None is the cache folder. ``freed`` receives the packed weights.
    ``packed`` is called with the name and the pack of each weight that was packed.
    """
    started = time.perf_counter()
    storage = CacheFolder() if storage is None else storage
    if freed is not None:
        # An earlier attempt may have freed weights.
        freed.undo()
    settle_rotary(model)
    known = CaptureStore(model, info, storage, config.kv).load() if stored else None
    if known is not None and not known.fits(plan_layout(info, config, known.observed)):
        known = None
    if known is None:
        with task("capture the model"):
            # Each uses its own copy: the observation may leave other tables of positions in the modules.
            observable = copy_over_same_tensors(model)
            quantized = () if config.quantized is None else config.quantized.packs.values()
            with reading_packs(observable, quantized):
                observed = observe(observable, info, routes)
                check_kv_sizes(config, observed)
                observed = observed.with_kv(config.kv)
            arena = _allocated(model, info, config, observed)
            captured = capture(copy_over_same_tensors(model), info, observed, arena.layout.of_capture)
    else:
        observed = known.observed
        arena = _allocated(model, info, config, observed)
        captured = known.graph(arena.layout.of_capture)
    captured.logits_processors = config.logits_processors
    config = replace(config, paging=arena.layout.paging)
    drafter = None
    if config.network is not None:
        drafter = make_drafter(config.network, config, arena.layout.of_capture, storage if stored else None)
        attach(drafter, captured)
    config = replace(
        config,
        route=observed.route,
        recurrent=bool(observed.recurrent),
        attends=bool(observed.kv),
        experts=has_experts(captured),
        rope_parts=reads_parts(captured),
    )
    check_trees(config)
    check_mode(config)
    check_checkpoints(config)
    check_kv(config)
    probe = None
    if freed is not None and not config.weights.rounds:
        # The model still reads its own weights here. Later it would unpack them: slower, and with more memory.
        probe = Probe.of(model, info, arena, reach_of(observed, arena), kv=config.kv)
        freed.release_unread()
    importance = None if config.calibration is None else config.calibration.importance
    packs = WeightPacks(config.weights, freed, all_names(model), config.quantized, importance, packed)
    if drafter is not None:
        packs.followers.append(drafter.packs)
    note = "exported" if known is None else "read from the store"
    first = Stage(CAPTURE, "the captured model", captured.copy(), time.perf_counter() - started, note)
    with task("run the passes"):
        _, model_stages = model_pipeline(config, packs, JoinedWeights(model, addresses_in_use())).run(captured, first)
        check_weights_named(packs)
        check_calibrated(config, packs)
        maker = StepMaker(model_stages, storage)
        tiers, prefill = steps_of_kind(config, maker, config.kind if kind is None else kind)
    from_store = known is not None or (drafter is not None and drafter.from_store)
    return BuiltStages(config, observed, arena, packs, model_stages, maker, tiers, prefill, from_store, probe, drafter)


def _allocated(model: PreTrainedModel, info: ModelInfo, config: BuildConfig, observed: Observation) -> Arena:
    check_pool_suits(config, observed)
    layout = plan_layout(info, config, observed)
    check_device_memory(model, info, config, layout)
    arena = Arena(layout, info.device)
    if config.max_draft_len:
        config.mode.start(arena)
    return arena


def check_weights_named(packs: WeightPacks) -> None:
    """Refuse forms of modules that do not exist, and quantised weights that no step reads.

    Raises:
        InvalidOption: a name of ``weights={name: form}`` decides on no weight, or one of a quantised checkpoint's
            weights is not among those that were packed.
    """
    if names := packs.unused_names():
        reason = f"no packed linear is in a module {names[0]!r}; use names of modules, as in named_modules()"
        if format := packs.stored_format(names[0]):
            reason = f"the weights of {names[0]!r} have the form that they are stored in ({format}); leave it out"
        elif (deciding := packs.deciding_name(names[0])) is not None:
            reason = f"{deciding!r} decides on the weights of {names[0]!r}; leave one out, or give both one form"
        raise InvalidOption(where="wrap", name="weights", value=dict(packs.forms.modules), reason=reason)
    if packs.quantized is not None:
        read = {id(pack) for pack in packs}
        if unread := [name for name, pack in packs.quantized.packs.items() if id(pack) not in read]:
            reason = f"no linear or embedding of a decode step reads {unread[0]}; leave it out"
            raise InvalidOption(where="wrap", name="weights", value=packs.quantized, reason=reason)


def check_calibrated(config: BuildConfig, packs: WeightPacks) -> None:
    """Refuse a calibration without the inputs of a weight that is rounded by it.

    Raises:
        InvalidCalibration: the inputs of a weight are missing.
    """
    if config.calibration is not None:
        rounded = (
            path
            for path, pack in packs.items()
            if pack.form.calibrated and not pack.format and not pack.is_table and pack.experts is None
        )
        config.calibration.check_covers(map(packs.names_of, rounded))


def check_trees(config: BuildConfig) -> None:
    """Refuse trees for a model whose layers do not support them.

    Raises:
        InvalidTiers: a tier is a tree, and the model keeps a recurrent state or runs its own attention, or all tiers
            run one shape.
    """
    if not config.trees:
        return
    reason = target_refusal(config.route, config.recurrent)
    if not reason and config.one_shape:
        reason = "deterministic=True needs kernels whose results do not depend on the number of nodes"
    if reason:
        raise InvalidTiers(tiers=config.tiers, reason=f"there are trees, and {reason}")


def check_mode(config: BuildConfig) -> None:
    """Refuse a drafter that would advance the target's recurrent state.

    Raises:
        InvalidOption: the target has a recurrent state, and the drafter runs the target's layers.
    """
    if config.recurrent and config.mode.runs_target_layers and config.max_draft_len > 0:
        reason = "it drafts with the model's own layers, which keep a recurrent state: drafts would advance it"
        raise InvalidOption(where="wrap", name="mode", value=config.mode.name, reason=reason)


def check_checkpoints(config: BuildConfig) -> None:
    """Refuse ``state_checkpoints`` for a model without a recurrent state.

    Raises:
        InvalidOption: the model keeps no recurrent state.
    """
    if config.state_checkpoints is not None and not config.recurrent:
        reason = "the model keeps no recurrent state and reuses prefixes of any length without them; leave it out"
        raise InvalidOption(where="wrap", name="state_checkpoints", value=config.state_checkpoints, reason=reason)


def check_kv(config: BuildConfig) -> None:
    """Refuse options of keys and values for a model that has none.

    Raises:
        InvalidOption: the model keeps no keys and values.
    """
    kv = None if config.kv is None else str(config.kv).removeprefix("torch.")
    pool = None if config.kv_memory is None else config.kv_memory.given
    for name, value in (("kv", kv), ("kv_memory", pool)):
        if value is not None and not config.attends:
            reason = "the model keeps a recurrent state, and no keys and values; leave it out"
            raise InvalidOption(where="wrap", name=name, value=value, reason=reason)


def check_kv_sizes(config: BuildConfig, observed: Observation) -> None:
    """Refuse 8 bits for keys and values whose features do not form the groups of a scale.

    Raises:
        InvalidOption: a head has an odd number of features, or a latent has a group in which its rotary key begins.
    """
    if config.kv is not torch.int8:
        return
    for layer, shape in observed.kv.items():
        latent = shape.key[0] == 1 and shape.key[1] > shape.value[1] and shape.value[1] % GROUP
        odd = shape.key[1] % 2 or shape.value[1] % 2
        if latent or odd:
            needed = f"latents of a multiple of {GROUP} features" if latent else "heads of an even size"
            reason = f"it needs {needed}, and layer {layer} has {shape.value[1]}; use float16"
            raise InvalidOption(where="wrap", name="kv", value="int8", reason=reason)


def reach_of(observed: Observation, arena: Arena) -> int:
    """The longest window or chunk; ``max_len`` if logits depend on the length that the cache reports."""
    return arena.layout.max_len if observed.counts else observed.reach
