"""The state of a wrap: every tensor that its steps keep, with its size."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from speccompile.adapters.buffers import slot_state
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.paging import plan_paging
from speccompile.compiler.pipelines import step_pipelines
from speccompile.errors import InvalidOption
from speccompile.graph.layer_state import checkpoint_state, cross_state, index_state, kv_state, recurrent_state
from speccompile.graph.paging import paged
from speccompile.graph.state import Layout, StateSpec, core_state, recorded_state, resolve_layout
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.graph_capture.observe import Observation
from speccompile.modes.network.draft_network import with_drafter
from speccompile.modes.network.draft_segments import segment_state
from speccompile.passes.base import Pass
from speccompile.passes.step.hand_over import hand_over_state
from speccompile.passes.user_pass import state_specs_of
from speccompile.sampling.pipeline import sampling_state

PREFILL_WIDTHS = (4, 8, 16, 32, 64, 128, 512)


def prefill_widths(max_len: int) -> tuple[int, ...]:
    """Chunk widths to build for prompts shorter than ``max_len``."""
    return tuple(width for width in PREFILL_WIDTHS if width == PREFILL_WIDTHS[0] or width <= max_len)


def split_state(config: BuildConfig) -> list[StateSpec]:
    """State that a split drafter stores for the target's executable, or for the drafter's next one."""
    if not config.mode.split:
        return []
    specs = hand_over_state(config.tiers, probabilities=config.stores_probabilities)
    if config.drafts_in_segments and config.network is not None:
        specs += segment_state(config.network.info.hidden_size, config.network.info.dtype)
    return specs


def state_specs(config: BuildConfig, vocab_size: int) -> list[StateSpec]:
    """All state except that of the target's layers and of a drafter's network."""
    return [
        *core_state(vocab_size),
        *sampling_state(),
        *recorded_state(vocab_size, prefill_widths(config.max_len)[-1], scores=config.scores),
        *config.mode.state(config.tiers),
        *_state_of_steps(config),
        *split_state(config),
        *config.rule.state(),
        *(spec for item in config.passes for spec in state_specs_of(item)),
        *([] if config.saved is None else config.saved.state()),
        *([] if config.adapters is None else [*slot_state(config.adapters.count), *config.adapters.state()]),
        *([] if config.head_adapters is None else config.head_adapters.state()),
        *([] if config.inputs is None else config.inputs.state(prefill_widths(config.max_len)[-1])),
    ]


def _state_of_steps(config: BuildConfig) -> list[StateSpec]:
    """State that the package's own passes of steps declare."""
    pipelines = step_pipelines(replace(config, passes=()), PREFILL_WIDTHS[0])
    passes = (item for pipeline in pipelines for item in pipeline.passes)
    return list({spec.name: spec for item in passes for spec in item.state_specs()}.values())


def plan_layout(info: ModelInfo, config: BuildConfig, observed: Observation) -> Layout:
    """All state tensors of the wrap, with their sizes.

    Raises:
        InvalidOption: a state tensor of the user's pass has the name of one of the model or the drafter, or a size
            below 0.
    """
    config = replace(config, route=observed.route)
    kept = [
        *kv_state(observed.kv),
        *index_state(observed.index),
        *cross_state(observed.cross, info.source_positions or 0),
        *recurrent_state(observed.recurrent),
        *checkpoint_state(observed.recurrent, config.checkpoints),
    ]
    for item in config.passes:
        _check_names(item, {spec.name for spec in kept})
    layout = resolve_layout(
        [*state_specs(config, info.vocab_size), *kept],
        max_batch=config.max_batch,
        max_len=config.max_len,
        max_draft_len=config.max_draft_len,
        max_width=config.max_width,
        vocab_size=info.vocab_size,
        num_logits=info.num_logits,
    )
    for item in config.passes:
        _check_sizes(item, layout)
    whole = layout
    if config.network is not None:
        whole = with_drafter(layout, config.network)
        for item in config.passes:
            _check_names(item, whole.tensors.keys() - layout.tensors.keys())
    if config.kv_memory is None or not observed.kv:
        return whole
    # Drafts of a chain are among the positions of a step. A block has its own.
    ahead = whole.max_width + (0 if config.network is None else config.network.places_per_row)
    return paged(whole, plan_paging(whole, config.kv_memory, ahead))


def _check_names(item: Pass, taken: Set[str]) -> None:
    for spec in state_specs_of(item):
        if spec.name in taken:
            reason = f"a state tensor of pass {item.name!r} has the name {spec.name!r} of another; rename it"
            raise InvalidOption(where="wrap", name="passes", value=item, reason=reason)


def _check_sizes(item: Pass, layout: Layout) -> None:
    for spec in state_specs_of(item):
        if min(layout.tensors[spec.name].shape, default=0) < 0:
            reason = f"state tensor {spec.name!r} of pass {item.name!r} has a size below 0: {spec.shape}"
            raise InvalidOption(where="wrap", name="passes", value=item, reason=reason)
