"""Checks of the options of ``wrap`` against the model, the mode and one another, before anything is captured.

Each function raises a ``UserError``. :class:`~speccompile.compiler.options.WrapOptions` checks each option by itself;
:mod:`speccompile.compiler.capabilities` checks combinations of modes, rules and backends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from speccompile.acceptance import Rule
from speccompile.compiler.capabilities import backend_refusal, rule_refusal, tree_refusal
from speccompile.compiler.config import BuildConfig
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.sharding import NO_DIGEST
from speccompile.errors import FreeOriginalsUnavailable, InvalidOption, InvalidTiers, UnsupportedSharded
from speccompile.graph.tree import Tree, depth_of
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.hidden_states.options import SaveHiddenStates
from speccompile.lowering.kernels import Kernels
from speccompile.modes.base import Mode
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.quantized import QuantizedPacks
from speccompile.ops.lora import MOST_ON_CUDA
from speccompile.ranks.ranks import Ranks
from speccompile.utils.devices import traits_of
from speccompile.utils.weight_forms import WeightForms


def check_checkpoints(options: WrapOptions, max_len: int) -> None:
    """Check that checkpoints of a recurrent state can be used, and that a slot holds at least one."""
    interval, reason = options.state_checkpoints, ""
    if interval is None:
        return
    if not options.prefix_reuse:
        reason = "with prefix_reuse=False no prompt continues from a checkpoint; use prefix_reuse=True, or leave it out"
    elif interval >= max_len:
        reason = f"it must be less than max_len ({max_len}), or a slot holds no checkpoint"
    if reason:
        raise InvalidOption(where="wrap", name="state_checkpoints", value=interval, reason=reason)


def check_rule(rule: Rule, mode: Mode, tiers: tuple[int, ...]) -> None:
    """Check that ``rule`` can judge the drafts of ``mode``, if a tier has drafts."""
    reason = rule_refusal(mode, rule)
    if reason and max(tiers) > 0:
        raise InvalidOption(where="wrap", name="acceptance", value=rule.name, reason=reason)


def check_trees(options: WrapOptions, mode: Mode, rule: Rule, info: ModelInfo) -> None:
    """Check that ``mode`` drafts and ``rule`` judges trees, and that the vocabulary has enough tokens for them."""
    if not any(isinstance(shape, Tree) for shape in options.draft_lens):
        return
    reason = tree_refusal(mode, rule)
    trees = (shape for shape in options.draft_lens if isinstance(shape, Tree))
    if not reason and (wide := next((tree for tree in trees if tree.branches > info.vocab_size), None)) is not None:
        reason = f"{wide} has more branches at a node than the vocabulary has tokens, {info.vocab_size}"
    if not reason and info.device.type not in mode.tree_devices:
        reason = f"mode {mode.name!r} only proposes them on {' and '.join(mode.tree_devices)}"
    if reason:
        raise InvalidTiers(tiers=options.draft_lens, reason=f"there are trees, and {reason}")


def check_most_drafts(mode: Mode, tiers: tuple[int, ...]) -> None:
    """Check that no tier has more drafts in a row of tokens than ``mode`` proposes."""
    most = mode.most_drafts
    if most is not None and max(map(depth_of, tiers)) > most:
        raise InvalidTiers(tiers=tiers, reason=f"mode {mode.name!r} drafts at most {most} tokens")


def check_unsharded(mode: Mode, ranks: Ranks | None) -> None:
    """Check that the model is not sharded, for a wrap that saves hidden states."""
    if ranks is not None:
        raise InvalidOption(where="wrap", name="mode", value=mode.name, reason=f"the model is sharded, and {NO_DIGEST}")


def check_encoder_decoder(options: WrapOptions, mode: Mode, ranks: Ranks | None, info: ModelInfo) -> None:
    """Refuse options that the decoder of an encoder-decoder does not have.

    Raises:
        InvalidOption: an option changes KV or weights in a form that the encoder's output does not have, or the drafter
            reads more than the decoder's text.
    """
    if info.source_positions is None:
        return
    trees = [tier for tier in options.tiers or () if not isinstance(tier, int)]
    refused: dict[str, tuple[Any, bool, str]] = {
        "mode": (
            mode.name,
            not mode.ready or mode.drafts_from_hidden,
            "its drafter reads more than the decoder's text",
        ),
        "kv": (options.kv, options.kv != "same", "the encoder's keys and values have no rounded form"),
        "kv_memory": (options.kv_memory, options.kv_memory is not None, "the encoder's keys and values have no pages"),
        "adapters": (options.adapters, options.adapters is not None, "adapters of encoders are not supported"),
        "tiers": (options.tiers, bool(trees), "a tree's nodes do not attend to an encoder's output"),
        "free_originals": (options.free_originals, options.free_originals, "the encoder reads the model's own weights"),
        "save_hidden_states": (
            options.save_hidden_states,
            options.save_hidden_states is not None,
            "records have no inputs of an encoder",
        ),
        "weights": (options.weights, isinstance(options.weights, QuantizedPacks), "the encoder reads its own weights"),
    }
    for name, (value, refuse, reason) in refused.items():
        if refuse and not (name == "mode" and mode.name == "none"):
            raise InvalidOption(
                where="wrap", name=name, value=value, reason=f"{info.name} is an encoder-decoder, and {reason}"
            )
    if ranks is not None:
        raise UnsupportedSharded(
            what="wrap()", reason=f"{info.name} is an encoder-decoder, whose encoder runs on one rank"
        )


def check_backend(mode: Mode, backend: str) -> None:
    """Check that ``mode`` runs on a device of ``backend``."""
    if reason := backend_refusal(mode, backend):
        raise InvalidOption(where="wrap", name="backend", value=backend, reason=reason)


def check_weights(options: WrapOptions, kernels: Kernels, backend: str, info: ModelInfo) -> None:
    """Check that the kernels of linears read the requested form of weights: a packed one with ``free_originals``."""
    if isinstance(options.weights, QuantizedPacks) and not (kernels.native or traits_of(info.device).cpp_ops):
        reason = (
            f"integers of a checkpoint only run on a CPU, and the model is on {info.device.type}; load it dequantised"
        )
        raise InvalidOption(where="wrap", name="weights", value=options.weights, reason=reason)
    if WeightForms.of(options.weights).rounds and not (kernels.native or kernels.rounded):
        where = f"with backend {backend!r} on {info.device.type}"
        reason = f"it needs the C++ ops, and {where} linears run on {kernels.reason}"
        raise InvalidOption(where="wrap", name="weights", value=options.weights, reason=reason)
    if options.free_originals and not kernels.native:
        reason = (
            f"with backend {backend!r} on {info.device.type} the linears' kernels are {kernels.reason}, which read the "
            "model's weights in place"
        )
        raise FreeOriginalsUnavailable(reason=reason, advice="; there is one copy of them then, too")
    if options.free_originals and isinstance(options.weights, QuantizedPacks):
        reason = f"the model's own values of the {options.weights.format} weights are released without it"
        raise FreeOriginalsUnavailable(reason=reason, advice="; there is one copy of them then, too")


def check_calibrated(options: WrapOptions) -> None:
    """Check that a form of weights is rounded by a calibration, for a wrap with a calibration."""
    forms = WeightForms.of(options.weights)
    if not any(FORMS[form].calibrated for form in (forms.others, *dict(forms.modules).values())):
        names = " or ".join(repr(name) for name, form in FORMS.items() if form.calibrated)
        reason = f"no weight has a form that is rounded by a calibration; give weights={names} with it"
        given = options.calibration
        value = str(given) if isinstance(given, Path) else given
        raise InvalidOption(where="wrap", name="calibration", value=value, reason=reason)


def check_network(network: DraftNetwork, config: BuildConfig, model: PreTrainedModel, free_originals: bool) -> None:
    """Check that the weights of ``network`` are not sharded, and can be rounded if an option rounds them."""
    if any(hasattr(weight, "to_local") for weight in network.module.parameters()):
        reason = "its weights, or the target's that it shares, are sharded; give the folder of a checkpoint"
        raise InvalidOption(where="wrap", name="draft", value=type(network.module).__name__, reason=reason)
    if network.weights == "same":
        return
    reason = ""
    if not (config.kernels.native or config.kernels.rounded):
        reason = f"it needs the C++ ops, and linears run on {config.kernels.reason}"
    elif network.module is model and (config.weights.format or config.weights == WeightForms(network.weights)):
        reason = f"the target's own weights are {config.weights} already"
    elif free_originals and _share_weights(network.module, model):
        reason = "free_originals=True frees the weights that this option rounds; use free_originals=False"
    if reason:
        option = config.mode.rounded_by
        raise config.mode.invalid(option, getattr(config.mode, option), reason)


def _share_weights(one: nn.Module, other: nn.Module) -> bool:
    return not {id(weight) for weight in one.parameters()}.isdisjoint(map(id, other.parameters()))


def check_learning(options: WrapOptions, config: BuildConfig, mode: Mode) -> None:
    """Check that ``mode`` has a head that can be trained during serving, for a wrap with ``learn``."""
    reason = ""
    if mode.learns_from is None:
        reason = f"mode {mode.name!r} has no head that can be trained; use a mode with an EAGLE-3, MTP or DFlash head"
    elif config.max_draft_len == 0:
        reason = "no tier has drafts; give tiers with a draft length above 0"
    elif not config.rule.text_invariant:
        reason = f"with the acceptance rule {config.rule.name!r} the text depends on the drafts; use acceptance='exact'"
    elif options.free_originals:
        reason = (
            "the head learns from the model's own weights, which free_originals=True frees; use free_originals=False"
        )
    elif config.weights.format:
        reason = f"the head learns from the model's lm_head, whose weights are stored as {config.weights.format}"
    elif options.save_hidden_states is not None:
        reason = "hidden states are kept for save_hidden_states; leave one of the two out"
    if reason:
        raise InvalidOption(where="wrap", name="learn", value=options.learn, reason=reason)


def check_adapters(options: WrapOptions, saves: SaveHiddenStates | None, info: ModelInfo) -> None:
    """Check that no hidden states are saved, and that the device has kernels for ``max_rank``."""
    assert options.adapters is not None
    if saves is not None:
        reason = "hidden states are saved of the model's own text, which adapters change; leave one of the two out"
        raise InvalidOption(where="wrap", name="adapters", value=options.adapters, reason=reason)
    check_rank(options.adapters.max_rank, "max_rank", options, info)


def check_rank(rank: int, name: str, options: WrapOptions, info: ModelInfo) -> None:
    """Check that the device has kernels for adapters of ``rank``, the field ``name`` of the option."""
    if traits_of(info.device).triton_ops and rank > MOST_ON_CUDA:
        reason = f"{name} must be at most {MOST_ON_CUDA} on {info.device.type}"
        raise InvalidOption(where="wrap", name="adapters", value=options.adapters, reason=reason)


def adaptable_head(options: WrapOptions, mode: Mode, network: DraftNetwork | None) -> nn.Module:
    """The head that adapters may have with other weights.

    Raises:
        InvalidOption: the drafter has another form, or it learns.
    """
    head = None if network is None else mode.adaptable_head
    reason = ""
    if head is None:
        reason = f"the drafter of mode {mode.label!r} is not a head that reads its own output; leave head_rank out"
    elif options.learn is not None:
        reason = "heads of adapters are differences from the shared head, which learns; leave head_rank or learn out"
    if reason or head is None:
        raise InvalidOption(where="wrap", name="adapters", value=options.adapters, reason=reason)
    return head
