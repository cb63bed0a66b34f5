"""``speccompile.wrap``: checks what was asked for, builds it, and hands back a speculator."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedModel

from speccompile import modes
from speccompile.acceptance import Rule, choose_rule
from speccompile.build import build
from speccompile.capabilities import backend_refusal, rule_refusal
from speccompile.errors import ConsumeUnavailable, InvalidOption, InvalidTiers
from speccompile.graph_capture.draft_network import DraftNetwork
from speccompile.graph_capture.rotary import check_rotary
from speccompile.graph_capture.support import ModelInfo, inspect_model
from speccompile.hidden_states.options import SaveHiddenStates, saved_rows
from speccompile.hidden_states.records import about
from speccompile.hidden_states.writer import RecordWriter
from speccompile.lowering.backends import choose_backend
from speccompile.lowering.cpu.consume import consuming
from speccompile.lowering.cpu.packing import WeightForm
from speccompile.lowering.inductor import bring
from speccompile.lowering.kernels import Kernels
from speccompile.modes.auto import Auto
from speccompile.modes.base import Mode
from speccompile.package import check_fits, given_options, read_package
from speccompile.pipelines import BuildConfig
from speccompile.policies.default import default_policy
from speccompile.runtime.inputs import check_generation_config, token_list
from speccompile.runtime.options import EngineOptions
from speccompile.runtime.policy import AnyPolicy, parse_policy
from speccompile.runtime.records import check_flag
from speccompile.sampling.user import Processor
from speccompile.sampling.user_check import check_processors
from speccompile.speculator import Speculator
from speccompile.storage import Brought, Storage

DEFAULT_TIERS = (0, 1, 3, 7)


def wrap(
    model: PreTrainedModel,
    mode: str | Sequence[str] | None = "ngram",
    *,
    tiers: Sequence[int] = DEFAULT_TIERS,
    max_batch: int = 1,
    max_len: int = 2048,
    backend: str = "auto",
    policy: str | AnyPolicy | None = None,
    acceptance: str | Rule | None = None,
    deterministic: bool | None = None,
    weights: WeightForm = "same",
    max_waiting: int = EngineOptions.max_waiting,
    prefill_budget: int | None = None,
    prefix_reuse: bool = True,
    sampling: bool = False,
    logits_processor: Processor | Sequence[Processor] | None = None,
    scores: bool = False,
    consume: bool = False,
    save_hidden_states: SaveHiddenStates | str | Path | None = None,
    **mode_options: Any,
) -> Speculator:
    """Make ``model`` decode speculatively, with the same text.

    Args:
        model: a causal LM with a KV cache, in eval mode, on one device. It is left as it was, unless ``consume``.
        mode: how to draft; see ``speccompile.modes.available()``. None is ``none``. Of several (``["suffix",
            "ngram"]``), for each row the first whose draft is good enough (``min_score=``, expected accepted tokens).
            ``auto`` chooses by what is given (``head=``, ``draft=``) and by what the model's checkpoint has;
            ``explain()`` says why.
        tiers: draft lengths to build, 0 among them.
        max_batch: slots: most requests that run at a time, and most prompts in one call of ``generate``. Steps run over
            the smallest of 1, 2, 4, ... rows that holds those alive.
        max_len: most tokens of a sequence, prompt included.
        backend: ``auto``, ``eager``, ``inductor``, or, on CUDA, ``cudagraph``.
        policy: ``"fixed:K"``, ``"schedule:1=7,4=3"`` (from so many live rows on, that K), ``"cost"`` (what drafts are
            worth over what the very tiers take, which are timed for it in front of the first step), ``"ema"``
            (SGLang's), ``"gate"`` (none while too few are accepted), these with options
            (``"ema:alpha=0.3,candidates=0/3/7"``), an object of :mod:`speccompile.policies`, or one with
            ``choose(live_rows) -> K``. None is ``"cost"``, and the largest tier under acceptance rules by which drawn
            text depends on the draft length.
        acceptance: ``exact``: the text does not depend on the drafts. ``rejection``: when tokens are drawn, only their
            distribution does not; ``block`` likewise, and it accepts more, of modes that draft with probabilities
            (``early_exit``). ``typical`` and ``relaxed`` are lossy. A name, or an object of
            :mod:`speccompile.acceptance` such as ``Typical(threshold=0.2)``. None is ``exact``, unless the variable
            TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS asks for ``Forced`` (for benchmarks).
        deterministic: True makes logits independent, in every bit, of tier and neighbours. None does so where it costs
            nothing: on a CPU, by kernels of ours that keep a row's order of sums. Without them all tiers run the widest
            tier's shape.
        weights: ``int8`` rounds the weights of linears and, as it goes, what they are multiplied with, in groups of 64.
            That is another model: it is faster, and its text differs. ``spec.check`` compares with that model.
        max_waiting: most requests of ``spec.engine`` that wait for a slot.
        prefill_budget: most prompt tokens that ``spec.engine`` reads between two decode steps. None reads them along
            with the steps, or in chunks between them, and keeps a step with its prompts within 2 usual steps.
        prefix_reuse: whether a prompt that begins like another text in the arena takes that one's KV.
            Where tiers run one shape for ``deterministic=True``, none does.
        sampling: build what draws tokens at once. Otherwise the first request that samples, or that wants any other
            processor, waits for it some seconds.
        logits_processor: a ``LogitsProcessor`` of your own, or a list of them, called as transformers calls them:
            ``processor(input_ids [B, P] int64, scores [B, V] float32) -> scores``. They hold for every request, behind
            the penalties and in front of temperature and what follows it. Each is traced into the steps and compared
            with itself over many texts: what looks at values in Python, keeps memory, or depends on lengths or other
            rows is refused.
        scores: make room for what ``output_logits`` and ``output_scores`` ask for: N * T * V * 8 bytes, N being
            ``max_batch + 1`` and T the largest tier + 1 (4 slots, K=7, a vocabulary of 50,000: 16 MB). Steps are not
            slower for requests that do not ask. ``logprobs`` and ``prompt_logprobs`` need none of it.
        consume: keep one copy of the weights: those that are packed take the place of the model's own, one by one, so
            that there never are two. The model can still do what it could, but slowly, since it unpacks a weight
            whenever it reads it; its weights cannot be changed, and it cannot be wrapped again. A wrap that fails
            gives them back. Needs kernels that read packed weights (a CPU, Inductor, a C++ compiler).
        save_hidden_states: save the target's hidden states of every text: a folder, or a
            :class:`~speccompile.hidden_states.SaveHiddenStates` with more to say. They are kept for all slots until
            their texts end (N * S * M values for each layer), and then written, each position once, never that of a
            rejected draft. ``mode="save_hidden_states"`` is the plain decoder with that.
        mode_options: options of the mode, such as ``max_ngram=3``.

    Raises:
        UserError: one class for each thing that can be wrong; see ``speccompile.errors``.
        CaptureMismatch: the captured graph does not compute what the model computes.
    """
    options: dict[str, Any] = dict(
        mode=mode,
        tiers=tiers,
        max_batch=max_batch,
        max_len=max_len,
        backend=backend,
        policy=policy,
        acceptance=acceptance,
        deterministic=deterministic,
        weights=weights,
        max_waiting=max_waiting,
        prefill_budget=prefill_budget,
        prefix_reuse=prefix_reuse,
        sampling=sampling,
        logits_processor=logits_processor,
        scores=scores,
        consume=consume,
        save_hidden_states=save_hidden_states,
        **mode_options,
    )
    return _wrap(model, options)


def load(path: str | os.PathLike[str], model: PreTrainedModel) -> Speculator:
    """What ``wrap`` gives with the options of the speculator that :meth:`Speculator.save` wrote to ``path``, without
    making again what the package holds.

    The capture check runs, as in every wrap. A package holds code: load only what you would also run.

    Args:
        path: of the package.
        model: of the class, configuration and weights' shapes that were wrapped; weights may have other values.

    Raises:
        CorruptPackage: the file is missing, cut off or changed.
        ForeignPackage: it was made for another model, by other versions, or on another kind of machine.
        SpecCompileError: as ``wrap``.
    """
    path = Path(path)
    package = read_package(path)
    check_fits(package, path, model)
    bring(package.files)
    return _wrap(model, given_options(package.manifest), Brought(package.files))


def _wrap(
    model: PreTrainedModel,
    options: dict[str, Any],
    storage: Storage | None = None,
) -> Speculator:
    """``options`` are the arguments of :func:`wrap`."""
    sampling = options["sampling"]
    if not isinstance(sampling, bool):
        raise InvalidOption(where="wrap", name="sampling", value=sampling, reason="use True or False")
    planned = {name: value for name, value in options.items() if name != "sampling"}
    plan = make_plan(model, **planned)
    # In front of the build: what is wrong with the folder is told at once.
    writer = None if plan.saves is None else RecordWriter(plan.saves, about(model, plan.saves))
    try:
        with consuming(model, plan.consume) as consumed:
            built = build(model, plan.info, plan.config, storage, consumed)
            spec = Speculator(model, built, plan.policy, plan.engine, options, writer)
            if sampling:
                spec.engine.prepare("sampled")
    except BaseException:
        if writer is not None:
            writer.close()
        raise
    return spec


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
    tiers: Sequence[int] = DEFAULT_TIERS,
    max_batch: int = 1,
    max_len: int = 2048,
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
    **mode_options: Any,
) -> Plan:
    """Check the arguments of :func:`wrap`, which are explained there."""
    draft_lens = _check_tiers(tiers)
    _check_whole("max_batch", max_batch, 1)
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
    rule = choose_rule(acceptance)
    asked = modes.create(mode, mode_options)
    default = default_policy(draft_lens, text_invariant=rule.text_invariant)
    chosen_policy = parse_policy(default if policy is None else policy, draft_lens)
    info = inspect_model(model)
    check_rotary(model, max_len)
    rule.check(info)
    chosen_backend = choose_backend(backend, info.device)
    kernels = chosen_backend.choose_kernels(info)
    choice, chosen_mode = None, asked
    if isinstance(asked, Auto):
        choice = asked.choose(
            model, modes.available(), draft_len=max(draft_lens), slots=max_batch, native=kernels.native
        )
        chosen_mode = modes.create(choice.name, choice.options)
    assert isinstance(chosen_mode, Mode)
    chosen_mode.check(info)
    _check_rule(rule, chosen_mode, draft_lens)
    saves = _choose_saves(save_hidden_states, chosen_mode)
    if saves is not None:
        saves.check(model)
    if reason := backend_refusal(chosen_mode, chosen_backend.name):
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
        backend=chosen_backend,
        deterministic=deterministic,
        rule=rule,
        scores=scores,
        kernels=kernels,
        weights=weights,
        choice=choice,
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
    check_generation_config(model.generation_config)
    token_list(model.generation_config.eos_token_id)
    _warn_of_generation_config(model, info, max_len)
    engine = EngineOptions(max_waiting, prefill_budget, prefix_reuse)
    # Behind everything that is quickly refused: it may have to be loaded.
    network = None
    if max(draft_lens) > 0:
        chosen_mode = chosen_mode.loaded(model)
        network = chosen_mode.network(model, info, max_len)
    if network is not None:
        _check_network(network, config, consume)
    saved = None if saves is None else saved_rows(model, saves)
    config = replace(config, mode=chosen_mode, logits_processors=processors, network=network, saved=saved)
    return Plan(info, config, chosen_policy, engine, consume, saves)


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
            raise InvalidTiers(tiers=tiers, reason=f"{value!r} is no draft length")
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


def _check_network(network: DraftNetwork, config: BuildConfig, consume: bool) -> None:
    most = network.most_drafts
    if most is not None and config.max_draft_len > most:
        reason = f"mode {config.mode.name!r} drafts at most {most} tokens with {network.info.name}"
        raise InvalidTiers(tiers=config.tiers, reason=reason)
    if network.weights == "same":
        return
    reason = ""
    if not config.kernels.native:
        reason = f"it needs the C++ ops, and linears run on {config.kernels.reason}"
    elif config.weights == network.weights:
        reason = f"the target's own weights are {config.weights} already"
    elif consume:
        reason = "consume=True takes the weights that it would round"
    if reason:
        where = f"mode {config.mode.name!r}"
        raise InvalidOption(where=where, name="draft", value=f"self:{network.weights}", reason=reason)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidOption(where="wrap", name=name, value=value, reason=f"it has to be an int of at least {least}")


def _warn_of_generation_config(model: PreTrainedModel, info: ModelInfo, max_len: int) -> None:
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and max_len > positions:
        warnings.warn(
            f"max_len={max_len} exceeds the {positions} positions that {info.name} was made for; "
            "its text may degrade behind them, as in transformers",
            stacklevel=5,
        )
