"""What a wrap is asked for, checked before anything is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from torch import nn
from transformers import PreTrainedModel

from speccompile import modes
from speccompile.acceptance import Rule, choose_rule
from speccompile.compiler.capabilities import backend_refusal, rule_refusal
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.pipelines import check_anchors
from speccompile.errors import ConsumeUnavailable, InvalidOption, InvalidTiers, shown
from speccompile.graph_capture.model_info import ModelInfo, inspect_model
from speccompile.graph_capture.rotary import check_rotary
from speccompile.hidden_states.options import SaveHiddenStates, saved_rows
from speccompile.lowering.backends import choose_backend
from speccompile.lowering.kernels import Kernels
from speccompile.modes.auto import Auto, Failed, replacing
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.ops.cpu.packing import WeightForm
from speccompile.passes.base import Pass
from speccompile.passes.placed import check_passes
from speccompile.policies.default import default_policy
from speccompile.runtime.arguments import GENERATE_ALONE, Settings
from speccompile.runtime.inputs import token_list
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.policy_controller import AnyPolicy, parse_policy
from speccompile.runtime.score_records import check_flag
from speccompile.sampling.user import Processor
from speccompile.sampling.user_check import check_processors
from speccompile.utils.warn import warn_caller

DEFAULT_TIERS = (0, 1, 3, 7)
#: Most tokens of a sequence where the caller does not say, and the model has as many positions.
DEFAULT_MAX_LEN = 2048


@dataclass(frozen=True)
class Plan:
    """What ``wrap`` was asked for, checked, before anything is captured."""

    info: ModelInfo
    config: BuildConfig
    policy: AnyPolicy
    engine: EngineOptions
    consume: bool = False
    saves: SaveHiddenStates | None = None


def make_plan(
    model: PreTrainedModel,
    mode: str | Sequence[str] | None,
    *,
    tiers: Sequence[int] | None = None,
    max_batch: int = 1,
    max_len: int | None = None,
    backend: str = "auto",
    policy: str | AnyPolicy | None = None,
    acceptance: str | Rule | None = None,
    deterministic: bool | None = None,
    weights: WeightForm = "same",
    max_waiting: int = EngineOptions.max_waiting,
    prefill_budget: int | None = None,
    prefix_reuse: bool = True,
    logits_processor: Processor | Sequence[Processor] | None = None,
    scores: bool = False,
    consume: bool = False,
    save_hidden_states: SaveHiddenStates | str | Path | None = None,
    passes: Sequence[Pass] = (),
    passed_over: Failed | None = None,
    **mode_options: Any,
) -> Plan:
    """Check the arguments of :func:`wrap`, which are explained there.

    Args:
        passed_over: what ``auto`` chose before and could not be built, see
            :func:`~speccompile.modes.auto.first_that_works`.

    Raises:
        ChoiceFailed: what ``auto`` chose now cannot be built.
    """
    draft_lens = _check_tiers(DEFAULT_TIERS if tiers is None else tiers)
    _check_whole("max_batch", max_batch, 1)
    if max_len is not None:
        _check_whole("max_len", max_len, 2)
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise InvalidOption(where="wrap", name="deterministic", value=deterministic, reason="use True, False or None")
    _check_whole("max_waiting", max_waiting, 0)
    if prefill_budget is not None:
        _check_whole("prefill_budget", prefill_budget, 1)
    if not isinstance(prefix_reuse, bool):
        raise InvalidOption(where="wrap", name="prefix_reuse", value=prefix_reuse, reason="use True or False")
    check_flag("wrap", "scores", scores)
    check_flag("wrap", "consume", consume)
    own_passes = check_passes(passes)
    rule = choose_rule(acceptance)
    asked = modes.create(mode, mode_options)
    chosen_policy = _choose_policy(policy, draft_lens, rule)
    info = inspect_model(model)
    max_len, max_len_reason = _choose_max_len(model, max_len)
    check_rotary(model, max_len)
    rule.check(info)
    chosen_backend = choose_backend(backend, info.device)
    kernels = chosen_backend.choose_kernels(info)
    choice, chosen_mode = None, asked
    if isinstance(asked, Auto):
        sizes: dict[str, Any] = dict(draft_len=max(draft_lens), slots=max_batch, native=kernels.native)
        choice = asked.choose(model, modes.available(), **sizes, failed=passed_over)
        chosen_mode = modes.create(choice.name, choice.options)
    assert isinstance(chosen_mode, Mode)
    with replacing(choice):
        chosen_mode.check(info)
        _check_rule(rule, chosen_mode, draft_lens)
    saves = _choose_saves(save_hidden_states, chosen_mode)
    if saves is not None:
        saves.check(model)
    if reason := backend_refusal(chosen_mode, chosen_backend.name):
        with replacing(choice):
            raise InvalidOption(where="wrap", name="backend", value=chosen_backend.name, reason=reason)
    if consume or weights != "same":
        # There is no other way then, so a model is not captured in vain.
        kernels = kernels.settled()
    _check_weights(weights, kernels)
    config = BuildConfig(
        mode=chosen_mode,
        tiers=draft_lens,
        max_batch=max_batch,
        max_len=max_len,
        max_len_reason=max_len_reason,
        backend=chosen_backend,
        deterministic=deterministic,
        rule=rule,
        scores=scores,
        kernels=kernels,
        weights=weights,
        choice=choice,
        passes=own_passes,
    )
    if consume and not config.kernels.native:
        reason = (
            f"with backend {chosen_backend.name!r} on {info.device.type} the linears' kernels are "
            f"{config.kernels.reason}, which read the model's weights where they lie"
        )
        raise ConsumeUnavailable(reason=reason, advice="; there is one copy of them then, too")
    if consume and weights != "same":
        reason = (
            f"with weights={weights!r} the model's own forward is what checks compare with, and rounded ones are not it"
        )
        raise ConsumeUnavailable(reason=reason, advice=", or weights='same'")
    processors = check_processors(
        logits_processor,
        vocab_size=info.vocab_size,
        max_len=max_len,
        places=max_len + config.max_width,
        device=info.device,
    )
    Settings(model.generation_config).check(heeded=GENERATE_ALONE)
    token_list(model.generation_config.eos_token_id)
    engine = EngineOptions(max_waiting, prefill_budget, prefix_reuse)
    # Behind everything that is quickly refused: it may have to be loaded.
    network = None
    if max(draft_lens) > 0:
        with replacing(choice):
            chosen_mode = chosen_mode.loaded(model)
            network = chosen_mode.network(model, info, max_len)
    if network is not None:
        if tiers is None and network.most_drafts is not None:
            draft_lens = tuple(sorted({min(size, network.most_drafts) for size in draft_lens}))
            chosen_policy = _choose_policy(policy, draft_lens, rule)
            config = replace(config, tiers=draft_lens)
        with replacing(choice):
            _check_network(network, config, model, consume)
    saved = None if saves is None else saved_rows(model, saves)
    config = replace(config, mode=chosen_mode, logits_processors=processors, network=network, saved=saved)
    check_anchors(config, info.vocab_size)
    return Plan(info, config, chosen_policy, engine, consume, saves)


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


def _choose_policy(given: str | AnyPolicy | None, tiers: tuple[int, ...], rule: Rule) -> AnyPolicy:
    return parse_policy(default_policy(tiers, text_invariant=rule.text_invariant) if given is None else given, tiers)


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


def _check_tiers(tiers: Sequence[int]) -> tuple[int, ...]:
    try:
        values = tuple(tiers)
    except TypeError:
        raise InvalidTiers(tiers=tiers, reason="it is no sequence") from None
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidTiers(tiers=tiers, reason=f"{shown(value)} is no draft length")
    if 0 not in values:
        raise InvalidTiers(tiers=tiers, reason="0 is missing")
    if len(set(values)) != len(values):
        raise InvalidTiers(tiers=tiers, reason="a draft length occurs twice")
    return tuple(sorted(values))


def _check_weights(form: WeightForm, kernels: Kernels) -> None:
    if form not in get_args(WeightForm):
        reason = f"choose from {', '.join(get_args(WeightForm))}"
        raise InvalidOption(where="wrap", name="weights", value=form, reason=reason)
    if form != "same" and not kernels.native:
        reason = f"it needs the C++ ops, and linears run on {kernels.reason}"
        raise InvalidOption(where="wrap", name="weights", value=form, reason=reason)


def _check_rule(rule: Rule, mode: Mode, tiers: tuple[int, ...]) -> None:
    reason = rule_refusal(mode, rule)
    if reason and max(tiers) > 0:
        raise InvalidOption(where="wrap", name="acceptance", value=rule.name, reason=reason)


def _check_network(network: DraftNetwork, config: BuildConfig, model: PreTrainedModel, consume: bool) -> None:
    most = network.most_drafts
    if most is not None and config.max_draft_len > most:
        reason = f"mode {config.mode.name!r} drafts at most {most} tokens with {network.info.name}"
        raise InvalidTiers(tiers=config.tiers, reason=reason)
    if network.weights == "same":
        return
    reason = ""
    if not config.kernels.native:
        reason = f"it needs the C++ ops, and linears run on {config.kernels.reason}"
    elif config.weights == network.weights and network.module is model:
        reason = f"the target's own weights are {config.weights} already"
    elif consume and _share_weights(network.module, model):
        reason = "consume=True takes the weights that it would round"
    if reason:
        option = config.mode.rounded_by
        raise config.mode.invalid(option, getattr(config.mode, option), reason)


def _share_weights(one: nn.Module, other: nn.Module) -> bool:
    return not {id(weight) for weight in one.parameters()}.isdisjoint(map(id, other.parameters()))


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidOption(where="wrap", name=name, value=value, reason=f"it has to be an int of at least {least}")


def warn_of_positions(model: PreTrainedModel, info: ModelInfo, max_len: int) -> None:
    """Warn of a ``max_len`` above the model's positions. Call it once a build has shown that such a text can be
    decoded: a model with a table of positions is refused."""
    positions = _positions(model)
    if positions is not None and max_len > positions:
        warn_caller(
            f"max_len={max_len} exceeds the {positions} positions that {info.name} was made for; "
            "its text may degrade behind them, as in transformers",
        )
