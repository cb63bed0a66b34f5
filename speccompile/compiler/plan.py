"""What a wrap builds: its options held against the model, before anything is captured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from speccompile import modes
from speccompile.acceptance import Rule, choose_rule
from speccompile.adapters.buffers import AdapterBuffers
from speccompile.calibration.calibration import Calibration
from speccompile.compiler.capabilities import backend_refusal, rule_refusal, tree_refusal
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.options import DEFAULT_MAX_LEN, WrapOptions
from speccompile.compiler.sharding import NO_DIGEST
from speccompile.compiler.user_passes import check_anchors
from speccompile.errors import ConsumeUnavailable, InvalidOption, InvalidTiers
from speccompile.graph.tree import Tree, depth_of
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.graph_capture.rotary import check_rotary
from speccompile.hidden_states.options import SavedRows, SaveHiddenStates, saved_rows
from speccompile.lowering.backends import ask, choose_backend
from speccompile.lowering.kernels import Kernels
from speccompile.modes.auto import Auto, Choice, Failed, replacing
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.passes.placement import check_passes
from speccompile.policies.default import default_policy
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.arguments import GENERATE_ONLY, Settings
from speccompile.runtime.inputs import token_list
from speccompile.runtime.policy_controller import AnyPolicy, parse_policy
from speccompile.sampling.user_check import check_processors
from speccompile.utils.devices import traits_of
from speccompile.utils.warn import warn_caller
from speccompile.utils.weight_forms import WeightForms


@dataclass(frozen=True)
class Plan:
    """What ``wrap`` was asked for, checked, before anything is captured."""

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
        passed_over: what ``auto`` chose before and could not be built, see
            :func:`~speccompile.modes.auto.first_that_works`.
        ranks: those of a sharded model.

    Raises:
        ChoiceFailed: what ``auto`` chose now cannot be built.
        UserError: an option does not fit the model or another option.
    """
    draft_lens = options.draft_lens
    own_passes = check_passes(options.passes)
    rule = choose_rule(options.acceptance)
    asked = modes.create(options.mode, dict(options.mode_options), others=options.parameters())
    policy = _choose_policy(options, draft_lens, rule)
    info = inspect_model(model)
    max_len, max_len_reason = _choose_max_len(model, options.max_len)
    _check_checkpoints(options, max_len)
    check_rotary(model, max_len)
    rule.check(info)
    backend = choose_backend(options.backend, info.device)
    kernels = ask(backend, "choose kernels", lambda: backend.choose_kernels(info), Kernels)
    mode, choice = _choose_mode(asked, model, options, kernels, passed_over)
    with replacing(choice):
        mode.check(info)
        _check_rule(rule, mode, draft_lens)
        _check_trees(options, mode, rule, info)
    saves = _choose_saves(options.save_hidden_states, mode)
    if saves is not None and ranks is not None:
        raise InvalidOption(where="wrap", name="mode", value=mode.name, reason=f"the model is sharded, and {NO_DIGEST}")
    if saves is not None:
        saves.check(model)
    if reason := backend_refusal(mode, backend.name):
        with replacing(choice):
            raise InvalidOption(where="wrap", name="backend", value=backend.name, reason=reason)
    if options.consume or WeightForms.of(options.weights).rounds:
        # There is no other way then, so a model is not captured in vain.
        kernels = kernels.settled()
    _check_weights(options, kernels, backend.name, info)
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
    )
    processors = check_processors(
        options.logits_processor,
        vocab_size=info.vocab_size,
        max_len=max_len,
        places=max_len + config.max_width,
        device=info.device,
    )
    Settings(model.generation_config).check(supported=GENERATE_ONLY)
    token_list(model.generation_config.eos_token_id)
    # After everything that is quickly refused: it may have to be loaded.
    network = None
    if max(draft_lens) > 0:
        with replacing(choice):
            mode = mode.loaded(model)
            # A checkpoint says how its head drafts.
            _check_trees(options, mode, rule, info)
            network = mode.network(model, info, max_len)
    most = mode.most_drafts
    if options.tiers is None and most is not None:
        draft_lens = tuple(sorted({min(size, most) for size in draft_lens}))
        policy = _choose_policy(options, draft_lens, rule)
        config = replace(config, tiers=draft_lens)
    with replacing(choice):
        if most is not None and max(map(depth_of, config.tiers)) > most:
            raise InvalidTiers(tiers=config.tiers, reason=f"mode {mode.name!r} drafts at most {most} tokens")
        if network is not None and any(hasattr(weight, "to_local") for weight in network.module.parameters()):
            reason = "its weights, or the target's that it shares, are sharded; give the folder of a checkpoint"
            raise InvalidOption(where="wrap", name="draft", value=type(network.module).__name__, reason=reason)
        if network is not None:
            _check_network(network, config, model, options.consume)
    saved = None if saves is None else saved_rows(model, saves)
    if options.learn is not None:
        saved = _learnt_rows(model, config, mode, options)
    if options.adapters is not None:
        if saves is not None:
            reason = "hidden states are saved of the model's own text, and adapters change it"
            raise InvalidOption(where="wrap", name="adapters", value=options.adapters, reason=reason)
        config = replace(config, adapters=AdapterBuffers.of(model, info, options.adapters))
    config = replace(config, mode=mode, logits_processors=processors, network=network, saved=saved)
    check_anchors(config, info.vocab_size)
    return Plan(info, config, policy, options, saves)


def _check_checkpoints(options: WrapOptions, max_len: int) -> None:
    interval, reason = options.state_checkpoints, ""
    if interval is None:
        return
    if not options.prefix_reuse:
        reason = "with prefix_reuse=False no prompt goes on from a checkpoint"
    elif interval >= max_len:
        reason = f"it must be less than max_len ({max_len}): a slot would have no checkpoint"
    if reason:
        raise InvalidOption(where="wrap", name="state_checkpoints", value=interval, reason=reason)


def _choose_mode(
    asked: Mode | Auto, model: PreTrainedModel, options: WrapOptions, kernels: Kernels, passed_over: Failed | None
) -> tuple[Mode, Choice | None]:
    """The mode, and by which choice of ``auto``, if that chose it."""
    if isinstance(asked, Mode):
        return asked, None
    choice = asked.choose(
        model,
        modes.available(),
        draft_len=max(options.draft_lens),
        slots=options.max_batch,
        native=kernels.native,
        failed=passed_over,
    )
    choice = replace(choice, predictions=asked.predictions)
    chosen = modes.create(choice.mode, choice.options)
    assert isinstance(chosen, Mode)
    return chosen, choice


def _positions(model: PreTrainedModel) -> int | None:
    """How many positions the model was made for, None where its config does not say."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 1 else None


def _choose_max_len(model: PreTrainedModel, given: int | None) -> tuple[int, str]:
    """``max_len``, and why that."""
    if given is not None:
        return given, ""
    positions = _positions(model)
    if positions is not None and positions < DEFAULT_MAX_LEN:
        return positions, f"max_len is the {positions} positions of the model"
    return DEFAULT_MAX_LEN, f"max_len is the default, {DEFAULT_MAX_LEN}"


def _choose_policy(options: WrapOptions, tiers: tuple[int, ...], rule: Rule) -> AnyPolicy:
    if options.policy is not None:
        return parse_policy(options.policy, tiers)
    return default_policy(tiers, text_invariant=rule.text_invariant)


def _choose_saves(given: Any, mode: Mode) -> SaveHiddenStates | None:
    if given is None:
        return mode.saves
    if mode.saves is not None:
        reason = f"mode {mode.name!r} says so by options of its own"
        raise InvalidOption(where="wrap", name="save_hidden_states", value=given, reason=reason)
    if isinstance(given, SaveHiddenStates):
        return given
    if not isinstance(given, str | Path):
        reason = "give a folder, a SaveHiddenStates, or None"
        raise InvalidOption(where="wrap", name="save_hidden_states", value=given, reason=reason)
    return SaveHiddenStates(given)


def _learnt_rows(model: PreTrainedModel, config: BuildConfig, mode: Mode, options: WrapOptions) -> SavedRows:
    """What is kept of each position for the head to learn from.

    Raises:
        InvalidOption: nothing can be learnt here.
    """
    reason, layers = "", mode.learns_from
    if layers is None:
        reason = f"mode {mode.name!r} has no head that can be trained; eagle3 and eagle3_one_model have"
    elif config.max_draft_len == 0:
        reason = "there is no tier with drafts"
    elif not config.rule.text_invariant:
        reason = f"with the acceptance rule {config.rule.name!r} the text depends on the drafts"
    elif options.consume:
        reason = "the head learns from the model's own weights, which consume=True gives up"
    elif config.weights.rounds:
        reason = f"the head learns from the model's own weights, and the text is of weights={options.weights!r}"
    elif options.save_hidden_states is not None:
        reason = "hidden states are kept for save_hidden_states"
    if reason or layers is None:
        raise InvalidOption(where="wrap", name="learn", value=options.learn, reason=reason)
    return SavedRows(layers, model.config.get_text_config(decoder=True).hidden_size, model.dtype)


def _check_weights(options: WrapOptions, kernels: Kernels, backend: str, info: ModelInfo) -> None:
    if isinstance(options.weights, QuantizedPacks) and not (kernels.native or traits_of(info.device).cpp_ops):
        reason = (
            f"integers of a checkpoint run on a CPU alone, and the model is on {info.device.type}; load it dequantised"
        )
        raise InvalidOption(where="wrap", name="weights", value=options.weights, reason=reason)
    if WeightForms.of(options.weights).rounds and not (kernels.native or kernels.rounded):
        reason = f"it needs the C++ ops, and linears run on {kernels.reason}"
        raise InvalidOption(where="wrap", name="weights", value=options.weights, reason=reason)
    if options.consume and not kernels.native:
        reason = (
            f"with backend {backend!r} on {info.device.type} the linears' kernels are {kernels.reason}, which read the "
            "model's weights where they lie"
        )
        raise ConsumeUnavailable(reason=reason, advice="; there is one copy of them then, too")
    if options.consume and isinstance(options.weights, QuantizedPacks):
        reason = f"the model's own values of the {options.weights.format} weights are released without it"
        raise ConsumeUnavailable(reason=reason, advice="; there is one copy of them then, too")


def _read_calibration(options: WrapOptions, model: PreTrainedModel) -> Calibration | None:
    given = options.calibration
    if given is None:
        return None
    forms = WeightForms.of(options.weights)
    if not any(FORMS[form].calibrated for form in (forms.others, *dict(forms.modules).values())):
        names = " or ".join(repr(name) for name, form in FORMS.items() if form.calibrated)
        reason = f"no weight has a form that a calibration concerns; give weights={names} with it"
        raise InvalidOption(where="wrap", name="calibration", value=given, reason=reason)
    calibration = given if isinstance(given, Calibration) else Calibration.load(given)
    calibration.check(model)
    return calibration


def _check_rule(rule: Rule, mode: Mode, tiers: tuple[int, ...]) -> None:
    reason = rule_refusal(mode, rule)
    if reason and max(tiers) > 0:
        raise InvalidOption(where="wrap", name="acceptance", value=rule.name, reason=reason)


def _check_trees(options: WrapOptions, mode: Mode, rule: Rule, info: ModelInfo) -> None:
    """Raises InvalidTiers."""
    if not any(isinstance(shape, Tree) for shape in options.draft_lens):
        return
    reason = tree_refusal(mode, rule)
    trees = (shape for shape in options.draft_lens if isinstance(shape, Tree))
    if not reason and (wide := next((tree for tree in trees if tree.branches > info.vocab_size), None)) is not None:
        reason = f"{wide} branches more often than the vocabulary has tokens, {info.vocab_size}"
    if not reason and info.device.type not in mode.tree_devices:
        reason = f"mode {mode.name!r} proposes them on {' and '.join(mode.tree_devices)} alone"
    if reason:
        raise InvalidTiers(tiers=options.draft_lens, reason=f"there are trees, and {reason}")


def _check_network(network: DraftNetwork, config: BuildConfig, model: PreTrainedModel, consume: bool) -> None:
    if network.weights == "same":
        return
    reason = ""
    if config.kernels.rounded:
        reason = "a drafter's weights are rounded on a CPU alone"
    elif not config.kernels.native:
        reason = f"it needs the C++ ops, and linears run on {config.kernels.reason}"
    elif network.module is model and (config.weights.format or config.weights == WeightForms(network.weights)):
        reason = f"the target's own weights are {config.weights} already"
    elif consume and _share_weights(network.module, model):
        reason = "consume=True takes the weights that it would round"
    if reason:
        option = config.mode.rounded_by
        raise config.mode.invalid(option, getattr(config.mode, option), reason)


def _share_weights(one: nn.Module, other: nn.Module) -> bool:
    return not {id(weight) for weight in one.parameters()}.isdisjoint(map(id, other.parameters()))


def warn_of_positions(model: PreTrainedModel, info: ModelInfo, max_len: int) -> None:
    """Warn of a ``max_len`` above the model's positions. Call it once a build has shown that such a text can be
    decoded: a model with a table of positions is refused."""
    positions = _positions(model)
    if positions is not None and max_len > positions:
        warn_caller(
            f"max_len={max_len} exceeds the {positions} positions that {info.name} was made for; "
            "its text may degrade after them, as in transformers",
        )
