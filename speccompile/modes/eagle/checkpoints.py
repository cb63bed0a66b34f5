"""Loading of published EAGLE-1 and EAGLE-2 heads: SafeAILab's (``layers.0.*``, ``fc``), copies of them for SGLang and
vLLM, and speculators' (type ``eagle``).

A tensor that is missing, not known or of another shape is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.shard_styles import whole_weight
from speccompile.modes.eagle.config import EagleConfig, check_target
from speccompile.modes.eagle.head import EagleHead
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    checkpoint_folder,
    read_tensors,
    renamed,
)
from speccompile.modes.network.config_keys import ConfigKeys, read_keys
from speccompile.modes.network.head_kinds import is_eagle, is_medusa
from speccompile.modes.network.made_for import check_made_for

#: Patterns of other names for the tensors, and replacements, applied in this order.
RENAMED = ((r"^model\.", ""), (r"^fusion_fc\.", "fc."), (r"^transformer\.", "layers.0."))
#: Tables that follow from the config.
IGNORED = re.compile(r".*\.rotary_emb\.inv_freq")
#: Norms of HASS's heads and of speculators' ``layernorms``.
NORMS = re.compile(r".*(embed|embedding|hidden|hidden_states|lm_head|pre_lm_head)_layernorm\.weight")


def load_eagle(source: str | Path, target: PreTrainedModel) -> EagleHead:
    """Load a head for ``target``, in the target's dtype, on its device.

    If the checkpoint has no embedding or no lm_head, the head shares the target's tensor.

    Args:
        source: a folder with ``config.json`` and safetensors files or ``pytorch_model.bin``; or the id of such a
            repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint was found, or it is of another kind or for another target.
        HeadKeys: keys are renamed, missing, not known or of another shape. The message lists them.
    """
    folder = checkpoint_folder(source, CHECKPOINT_FILES)
    name = str(source)
    tensors = renamed(read_tensors(folder, name), RENAMED, name)
    tensors = {key: value for key, value in tensors.items() if not IGNORED.fullmatch(key)}
    config = read_config(folder, name, tensors)
    check_target(config, name, target)
    head = EagleHead(config)
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    shared = {"embed_tokens.weight": target.get_input_embeddings(), "lm_head.weight": target.get_output_embeddings()}
    check_tensors(tensors, expected, name, optional=shared)
    head.load_state_dict(tensors, strict=False)
    head = head.to(target.device, target.dtype).eval()
    own: dict[str, torch.Tensor] = {}
    for key, argument in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "lm_head")):
        if key not in tensors:
            module = shared[key]
            assert isinstance(module, nn.Module)
            own[argument] = whole_weight(module)
    head.share(**own)
    check_made_for(folder, name, target)
    return head.requires_grad_(False)


def read_config(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> EagleConfig:
    """The config of a head. In speculators' layout its sizes are in ``transformer_layer_config``. If the config leaves
    out biases, the ``tensors`` show them.

    Raises:
        InvalidHead: a key is missing, or the head is of another kind.
    """
    given = read_keys(folder / "config.json", name)
    if reason := other_kind(given, tensors):
        raise InvalidHead(source=name, reason=reason)
    keys = ConfigKeys({**ConfigKeys(given, name).part("transformer_layer_config"), **given}, name)
    size, flag = keys.size, keys.flag
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    first = "layers.0.self_attn"
    return EagleConfig(
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocab_size=size("vocab_size"),
        num_hidden_layers=size("num_hidden_layers", 1),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        hidden_act=str(keys.get("hidden_act", "silu")),
        max_position_embeddings=size("max_position_embeddings", 2048),
        rope=keys.rope(),
        # SafeAILab's default is true. Engines read it from the tensors: configs that were copied lack the key.
        bias="fc.bias" in tensors or flag("bias") or flag("fusion_bias"),
        qkv_bias=flag("qkv_bias") or f"{first}.q_proj.bias" in tensors,
        attention_bias=flag("attention_bias") or f"{first}.o_proj.bias" in tensors,
        mlp_bias=flag("mlp_bias") or "layers.0.mlp.gate_proj.bias" in tensors,
    )


def other_kind(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """The reason why files are not those of an EAGLE head; empty if they are."""
    kind = config.get("speculators_model_type")
    if is_medusa(config):
        return "it is a checkpoint of Medusa heads; use mode='medusa'"
    if kind not in (None, "eagle"):
        return f"it is a head of type {kind!r}, not 'eagle'"
    if norms := sorted(key for key in tensors if NORMS.fullmatch(key)) or config.get("layernorms"):
        named = f" ({', '.join(norms)})" if isinstance(norms, list) else ""
        return (
            f"it is an EAGLE head with norms of its inputs and its output{named}, which engines read in different "
            "ways; such heads are not supported"
        )
    if "fc.weight" in tensors and not is_eagle(tensors):
        return "its fc does not join an embedding and one hidden state; use mode='eagle3' for an EAGLE-3 head"
    return ""
