"""Reading of the config.json of published EAGLE-3 heads, in two layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.modes.eagle3.config import EMBEDDING, Eagle3Config
from speccompile.modes.network.config_keys import MASK_TOKENS, ConfigKeys, read_keys
from speccompile.modes.network.head_kinds import unread_kind
from speccompile.passes.step.tap_hidden import default_taps

#: Variants that are not supported: the key that selects each, and its description.
REFUSED = {
    "eh_proj_before_attn": "a projection before the attention",
    "next_layer_regular": "layers of another kind after the first",
    "kv_lora_rank": "latent attention",
}
#: The key of the target's layers that a head reads, and the key of the kinds of the head's own layers.
LAYER_IDS, LAYER_TYPES = "eagle_aux_hidden_state_layer_ids", "layer_types"
#: speculators' type of a head that drafts all tokens at once.
PARALLEL = "peagle"
#: The ``model_type`` of the decoder layers of speculators' heads. Qwen3's layers have norms of queries and keys.
LAYER_KINDS = ("llama", "qwen3")


def read_config(folder: Path, name: str, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Eagle3Config:
    """The config of a head for ``target``.

    In the flat layout (SafeAILab, SpecForge, TensorRT-LLM) all keys are at the top level or in ``eagle_config``. In
    speculators' layout, sizes are in ``transformer_layer_config``. If the config leaves out a variant, the ``tensors``
    show it: biases, ``fc_norm``, and norms of queries and keys. A key that is absent or null has EAGLE-3's default: the
    next draft step reads the hidden state before the last norm. ``norm_output`` has the meaning of speculators, SGLang
    and TensorRT-LLM.

    Raises:
        InvalidHead: a key is missing, or the head is of another kind or another target.
    """
    given = read_keys(folder / "config.json", name)
    if other := unread_kind(given, tensors):
        raise InvalidHead(source=name, reason=f"it is {other}")
    kind = given.get("speculators_model_type")
    if kind not in (None, "eagle3", PARALLEL):
        raise InvalidHead(source=name, reason=f"it is a head of type {kind!r}, not 'eagle3' or {PARALLEL!r}")
    parts = {part: ConfigKeys(given, name).part(part) for part in ("transformer_layer_config", "eagle_config")}
    keys: dict[str, Any] = {**parts["transformer_layer_config"], **parts["eagle_config"], **given}
    speculators = kind is not None
    layer = parts["transformer_layer_config"].get("model_type")
    if speculators and layer not in (None, *LAYER_KINDS):
        kinds = " or ".join(map(repr, LAYER_KINDS))
        reason = f"the model_type of its layers must be {kinds} in speculators' layout, got {layer!r}"
        raise InvalidHead(source=name, reason=reason)
    for key, what in REFUSED.items():
        # next_layer_regular: TensorRT-LLM's default is True, and the key only affects heads with several layers.
        if keys.get(key) and not (key == "next_layer_regular" and _layers(keys) == 1):
            raise InvalidHead(
                source=name, reason=f"its config has {key}={keys[key]!r} ({what}), which is not supported"
            )
    config = replace(
        _config(ConfigKeys(keys, name), name, tensors),
        taps=_taps(ConfigKeys(keys, name), inputs=speculators) or default_taps(len(decoder_layers(target)[1])),
        # In the flat layout model_type does not describe the layer: heads for Qwen3 have Llama's layers.
        qk_norm=(speculators and layer == "qwen3") or "layers.0.self_attn.q_norm.weight" in tensors,
    )
    check_target(config, name, target)
    return config


def _config(keys: ConfigKeys, name: str, tensors: Mapping[str, torch.Tensor]) -> Eagle3Config:
    size, number, flag = keys.size, keys.number, keys.flag
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab = size("vocab_size")
    layers = size("num_hidden_layers", 1)
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=size("target_hidden_size", hidden),
        intermediate_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=size("draft_vocab_size", vocab),
        num_hidden_layers=layers,
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        hidden_act=str(keys.get("hidden_act", "silu")),
        max_position_embeddings=size("max_position_embeddings", 2048),
        rope=keys.rope(),
        windows=_windows(keys, layers),
        bias=flag("bias") or "fc.bias" in tensors,
        attention_bias=flag("attention_bias") or "layers.0.self_attn.q_proj.bias" in tensors,
        mlp_bias=flag("mlp_bias") or "layers.0.mlp.gate_proj.bias" in tensors,
        fc_norm=flag("fc_norm") or flag("use_aux_norm") or "fc_norm.0.weight" in tensors,
        norm_before_fc=flag("norm_before_fc") or "input_norm.weight" in tensors,
        norm_before_residual=flag("norm_before_residual"),
        norm_output=flag("norm_output") or flag("return_hidden_post_norm"),
        mask_token_id=_mask_token(keys, name, tensors),
        # The key is not reliable: it can be copied from a target's config. vLLM does not read it.
        tie_word_embeddings=flag("tie_word_embeddings") and "lm_head.weight" not in tensors,
    )


def _taps(keys: ConfigKeys, *, inputs: bool) -> tuple[int, ...]:
    """The layers of the target whose outputs the head reads, ascending; empty if the ids are null or empty.

    The meaning of an id depends on the layout:

    - ``inputs``, speculators' layout: id j is the input of layer j, which is the output of layer j - 1. Id 0 is the
      embedding, id L the last layer's output before the final norm. speculators passes these ids to vLLM
      (``models/utils.py``, ``resolve_target_layer_ids``: 0 .. L, by default ``[2, L // 2, L - 3]``;
      ``scripts/launch_vllm.py``), and vLLM reads them in this way (``aux_hidden_state_layers`` of its models).
    - otherwise, the flat layout: id j is the output of layer j. SGLang adds 1, since it captures before a layer
      (``set_eagle3_layers_to_capture`` of its ``models/llama.py``). TensorRT-LLM captures after the layer. SafeAILab's
      own configs have no ids.

    The default is the same three states in both layouts, see ``default_taps``.
    """
    # vLLM and TensorRT-LLM collect the states in the order of layers, not of ids.
    return tuple(sorted(item - inputs for item in keys.layers(LAYER_IDS)))


def _windows(keys: ConfigKeys, layers: int) -> tuple[int | None, ...]:
    """The window of each layer; empty if no layer slides.

    Only the kinds of layers decide, as in speculators and vLLM: configs that were copied from a target's can have a
    ``sliding_window`` that is not used.
    """
    kinds = keys.kinds(LAYER_TYPES, layers) or []
    if "sliding_attention" not in kinds:
        return ()
    window = keys.size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _mask_token(keys: ConfigKeys, name: str, tensors: Mapping[str, torch.Tensor]) -> int | None:
    """The mask token of a head that drafts all tokens at once; None for other heads.

    Raises:
        InvalidHead: its tensors are those of such a head, and its config has no mask token.
    """
    key = next((key for key in MASK_TOKENS if keys.get(key) is not None), None)
    if keys.flag("parallel_drafting") or keys.get("speculators_model_type") == PARALLEL:
        return keys.size(key or MASK_TOKENS[0], least=0)
    if "mask_hidden" in tensors:
        what = "it is a P-EAGLE head, which drafts all tokens at once (its tensors have mask_hidden)"
        lacks = f"its config must have parallel_drafting=true and its mask token as {' or '.join(MASK_TOKENS)}"
        raise InvalidHead(source=name, reason=f"{what}, and {lacks}")
    return None


def _layers(keys: Mapping[str, Any]) -> Any:
    return keys.get("num_hidden_layers") or 1


def check_target(config: Eagle3Config, name: str, target: PreTrainedModel) -> None:
    """Check that a head with this config fits ``target``.

    Raises:
        InvalidHead: the head is for another target.
    """
    text = target.config.get_text_config(decoder=True)
    layers = len(decoder_layers(target)[1])
    problems = []
    if config.vocab_size != text.vocab_size:
        problems.append(f"its vocabulary has {config.vocab_size} tokens, the target's {text.vocab_size}")
    if config.target_hidden_size != text.hidden_size:
        problems.append(
            f"it reads hidden states of size {config.target_hidden_size}, the target's is {text.hidden_size}"
        )
    if config.taps and not (config.taps[0] >= EMBEDDING and config.taps[-1] < layers):
        taps = [tap for tap in config.taps if tap != EMBEDDING]
        problems.append(f"it reads the outputs of layers {taps}, and the target has 0 .. {layers - 1}")
    if problems:
        raise InvalidHead(source=name, reason=f"it is for another target: {'; '.join(problems)}")
