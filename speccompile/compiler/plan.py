"""The plan of a wrap: its options, checked against the model before anything is captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile import modes
from speccompile.acceptance import Rule, choose_rule
from speccompile.adapters.buffers import AdapterBuffers
from speccompile.adapters.head import head_buffers
from speccompile.calibration.calibration import Calibration
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.default_pool import choose_sizes, positions_of
from speccompile.compiler.option_checks import (
    adaptable_head,
    check_adapters,
    check_backend,
    check_calibrated,
    check_checkpoints,
    check_encoder_decoder,
    check_learning,
    check_most_drafts,
    check_network,
    check_rank,
    check_rule,
    check_trees,
    check_unsharded,
    check_weights,
)
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.user_passes import check_anchors
from speccompile.errors import InvalidOption
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.graph_capture.rotary import check_rotary
from speccompile.hidden_states.options import SavedRows, SaveHiddenStates, saved_rows
from speccompile.lowering.backends import ask, choose_backend
from speccompile.lowering.kernels import Kernels
from speccompile.modes.auto import Auto, Choice, Failed, replacing
from speccompile.modes.base import Mode
from speccompile.multimodal.model_inputs import ModelInputs
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.passes.placement import check_passes
from speccompile.policies.default import default_policy
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.arguments import Settings, read_by_generate
from speccompile.runtime.inputs import token_list
from speccompile.runtime.policy_controller import AnyPolicy, parse_policy
from speccompile.sampling.user_check import check_processors
from speccompile.utils.warn import warn_caller
from speccompile.utils.weight_forms import WeightForm, WeightForms


@dataclass(frozen=True)
class Plan:
    """The options of ``wrap`` after their checks, and the objects that they name."""

    info: ModelInfo
    config: BuildConfig
    policy: AnyPolicy
    options: WrapOptions
    saves: SaveHiddenStates | None = None


def make_plan(
    model: PreTrainedModel, options: WrapOptions, *, passed_over: Failed | None = None, ranks: Ranks | None = None
) -> Plan:
    """Check ``options`` against the model.

    Args:
        passed_over: choices of ``auto`` that could not be built, see
            :func:`~speccompile.modes.auto.first_that_works`.
        ranks: those of a sharded model.

    Raises:
        ChoiceFailed: the choice of ``auto`` cannot be built.
        UserError: an option cannot be combined with the model or another option.
    """
    draft_lens = options.draft_lens
    own_passes = check_passes(options.passes)
    rule = choose_rule(options.acceptance)
    requested = modes.create(options.mode, dict(options.mode_options), others=options.parameters())
    policy = _choose_policy(options, draft_lens, rule)
    info = inspect_model(model)
    backend = choose_backend(options.backend, info.device)
    kernels = ask(backend, "choose kernels", lambda: backend.choose_kernels(info), Kernels)
    failed = passed_over or {}
    max_len, max_len_reason, kv_memory = choose_sizes(model, options, kernels, failed)
    check_checkpoints(options, max_len)
    check_rotary(model, max_len)
    rule.check(info)
    mode, choice = _choose_mode(requested, model, options, kernels, passed_over)
    with replacing(choice):
        mode.check(info)
        check_encoder_decoder(options, mode, ranks, info)
        check_rule(rule, mode, draft_lens)
        check_trees(options, mode, rule, info)
    saves = _choose_saves(options.save_hidden_states, mode)
    if saves is not None:
        check_unsharded(mode, ranks)
        saves.check(model)
    with replacing(choice):
        check_backend(mode, backend.name)
    if options.adapters is not None:
        kernels.prepare("lora")
    rounded = ["rounded"] * WeightForms.of(options.weights).rounds
    kernels.prepare(*rounded)
    if options.free_originals or rounded:
        # These options need the C++ ops. Waiting for them here avoids a capture in vain.
        kernels = kernels.settled(*rounded)
    check_weights(options, kernels, backend.name, info)
    undecided = mode
    mode, kernels = _decide_draft_weights(mode, kernels, options, rule)
    config = BuildConfig(
        mode=mode,
        tiers=draft_lens,
        max_batch=options.max_batch,
        max_len=max_len,
        max_len_reason=max_len_reason,
        backend=backend,
        deterministic=options.deterministic,
        rule=rule,
        scores=options.scores,
        kernels=kernels,
        weights=WeightForms.of(options.weights),
        quantized=options.weights if isinstance(options.weights, QuantizedPacks) else None,
        calibration=_read_calibration(options, model),
        choice=choice,
        passes=own_passes,
        state_checkpoints=options.state_checkpoints,
        ranks=ranks,
        kv=None if options.kv == "same" else getattr(torch, options.kv),
        kv_memory=kv_memory,
        # Ranks repeat the steps of the first one, not what it embeds.
        inputs=None if ranks is not None else ModelInputs.of(model, info),
    )
    processors = check_processors(
        options.logits_processor,
        vocab_size=info.vocab_size,
        max_len=max_len,
        places=max_len + config.max_width,
        device=info.device,
    )
    Settings(model.generation_config).check(supported=read_by_generate(model))
    token_list(model.generation_config.eos_token_id)
    # After the quick checks: the network may be loaded from a checkpoint.
    network = None
    if max(draft_lens) > 0:
        with replacing(choice):
            mode = mode.loaded(model)
            # The checkpoint decides whether its head drafts trees.
            check_trees(options, mode, rule, info)
            network = mode.network(model, info, mode.drafts_up_to(max_len))
            # A target that drafts for itself drafts what it emits, unless it is rounded.
            if network is not None and network.module is model:
                mode = undecided.with_draft_weights("same").loaded(model)
                network = mode.network(model, info, mode.drafts_up_to(max_len))
    most = mode.most_drafts
    if options.tiers is None and most is not None:
        draft_lens = tuple(sorted({min(size, most) for size in draft_lens}))
        policy = _choose_policy(options, draft_lens, rule)
        config = replace(config, tiers=draft_lens)
    with replacing(choice):
        check_most_drafts(mode, config.tiers)
        if network is not None:
            check_network(network, config, model, options.free_originals)
    saved = None if saves is None else saved_rows(model, saves)
    if options.learn is not None:
        check_learning(options, config, mode)
        assert mode.learns_from is not None
        saved = SavedRows(mode.learns_from, model.config.get_text_config(decoder=True).hidden_size, model.dtype)
    if options.adapters is not None:
        check_adapters(options, saves, info)
        config = replace(config, adapters=AdapterBuffers.of(model, info, options.adapters))
        if options.adapters.head_rank is not None:
            head = adaptable_head(options, mode, network)
            buffers = head_buffers(head, model, options.adapters)
            config = replace(config, head_adapters=buffers)
            check_rank(buffers.max_rank, "head_rank", options, info)
    config = replace(config, mode=mode, logits_processors=processors, network=network, saved=saved)
    check_anchors(config, info.vocab_size)
    return Plan(info, config, policy, options, saves)


def _choose_mode(
    requested: Mode | Auto, model: PreTrainedModel, options: WrapOptions, kernels: Kernels, passed_over: Failed | None
) -> tuple[Mode, Choice | None]:
    """The mode, and the choice of ``auto`` that led to it, or None."""
    if isinstance(requested, Mode):
        return requested, None
    choice = requested.choose(
        model,
        modes.available(),
        draft_len=max(options.draft_lens),
        slots=options.max_batch,
        native=kernels.native,
        failed=passed_over,
    )
    choice = replace(choice, predictions=requested.predictions)
    chosen = modes.create(choice.mode, choice.options)
    assert isinstance(chosen, Mode)
    return chosen, choice


def _decide_draft_weights(mode: Mode, kernels: Kernels, options: WrapOptions, rule: Rule) -> tuple[Mode, Kernels]:
    """The mode without ``draft_weights="auto"``, and the kernels, whose ops can be called if drafts are rounded."""
    same = mode.with_draft_weights("same")
    kept = options.free_originals or options.learn is not None or max(options.draft_lens) == 0
    if same is mode or kept or not (rule.text_invariant and kernels.native):
        return same, kernels
    kernels = kernels.settled("rounded")
    # A head's drafts are as good in 4 bits as in 8. A draft model is a language model, which loses more.
    form: WeightForm = "int4" if mode.drafts_from_hidden else "int8"
    return mode.with_draft_weights(form) if kernels.native else same, kernels


def _choose_policy(options: WrapOptions, tiers: tuple[int, ...], rule: Rule) -> AnyPolicy:
    if options.policy is not None:
        return parse_policy(options.policy, tiers)
    return default_policy(tiers, text_invariant=rule.text_invariant)


def _choose_saves(given: Any, mode: Mode) -> SaveHiddenStates | None:
    if given is None:
        return mode.saves
    if mode.saves is not None:
        reason = f"mode {mode.name!r} has its own options for this; give them instead"
        raise InvalidOption(where="wrap", name="save_hidden_states", value=given, reason=reason)
    if isinstance(given, SaveHiddenStates):
        return given
    if not isinstance(given, str | Path):
        reason = "give a folder, a SaveHiddenStates, or None"
        raise InvalidOption(where="wrap", name="save_hidden_states", value=given, reason=reason)
    return SaveHiddenStates(given)


def _read_calibration(options: WrapOptions, model: PreTrainedModel) -> Calibration | None:
    given = options.calibration
    if given is None:
        return None
    check_calibrated(options)
    calibration = given if isinstance(given, Calibration) else Calibration.load(given)
    calibration.check(model)
    return calibration


def warn_of_positions(model: PreTrainedModel, info: ModelInfo, max_len: int) -> None:
    """Warn of a ``max_len`` above the model's positions.

    Call it after a build, which refuses a model with a table of too few positions.
    """
    positions = positions_of(model)
    if positions is not None and max_len > positions:
        warn_caller(
            f"max_len={max_len} exceeds the {positions} positions that {info.name} was trained for; "
            "its text may degrade after them, as in transformers. Give a smaller max_len to avoid this",
        )
