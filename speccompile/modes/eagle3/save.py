"""Saving of EAGLE-3 heads, in the layouts of published heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save

from speccompile.errors import InvalidHead, InvalidOption
from speccompile.modes.eagle3.config import Eagle3Config
from speccompile.modes.eagle3.config_files import LAYER_IDS
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.network.made_for import noted
from speccompile.sampling.draft_vocab import target_ids
from speccompile.utils.whole_files import write_whole

#: Layouts of files. speculators and vLLM read ``speculators``. SpecForge, SGLang, vLLM and TensorRT-LLM read
#: ``specforge`` (SafeAILab's). :func:`~speccompile.modes.eagle3.checkpoints.load_eagle3` reads both.
Layout = Literal["speculators", "specforge"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

#: The version of speculators whose fields and keys the layout has.
SPECULATORS_VERSION = "0.9.0"


def save_eagle3(
    head: Eagle3Head,
    folder: str | Path,
    *,
    layout: Layout = "speculators",
    dtype: torch.dtype = torch.float16,
    target: str = "LlamaForCausalLM",
    draft_len: int = 3,
    embedding: bool = False,
    target_name: str | None = None,
    target_id: str | None = None,
) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    Args:
        folder: created if it does not exist. Each file is complete or absent, also after the process is killed.
        layout: the layout of the files.
        dtype: the dtype of the written weights.
        target: the class of the target, for the config.
        draft_len: the default number of draft tokens for other engines. Only speculators' layout has it.
        embedding: write the embedding also if it is the target's own tensor. Engines read it from the target. Only
            speculators' own class (0.9) does not: without it, it drafts with zeros.
        target_name: the hub id or folder of the target, for the config of speculators' layout. Its class reads the
            target's config when it loads a head.
        target_id: the target's :func:`~speccompile.hidden_states.target_id.target_id`, written to the config. A later
            load for another target then warns.

    Raises:
        InvalidOption: ``layout`` is not one of the two.
        InvalidHead: the layout does not support the head's variant.
        OSError: a file cannot be written.
    """
    if layout not in LAYOUTS:
        reason = f"choose from {', '.join(LAYOUTS)}"
        raise InvalidOption(where="save_eagle3", name="layout", value=layout, reason=reason)
    if head.config.windows or head.config.num_hidden_layers > 1 or head.config.mask_token_id is not None:
        reason = "only heads of one layer without a window, which draft one token after another, can be written"
        raise InvalidHead(source="that was given", reason=reason)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / "model.safetensors", save(_tensors(head, dtype, layout, embedding), {"format": "pt"}))
    kind = str(dtype).removeprefix("torch.")
    config = (
        _speculators(head.config, kind, target, target_name, draft_len)
        if layout == "speculators"
        else _specforge(head.config, kind)
    )
    config |= noted(target_id)
    write_whole(path / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def _tensors(head: Eagle3Head, dtype: torch.dtype, layout: str, embedding: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in head.state_dict().items():
        shared = name == "embed_tokens.weight" and head.shares_embedding and not embedding
        if name == "d2t" or shared:
            continue
        key = name.replace("layers.0.", "midlayer.") if layout == "specforge" else name
        found[key] = value.detach().to("cpu", dtype).contiguous()
    if head.d2t is not None:
        found["d2t"] = head.d2t.cpu()
        found["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        found["t2d"][target_ids(found["d2t"])] = True
    return found


def _layer(config: Eagle3Config) -> dict[str, Any]:
    """The config of the decoder layer, with the keys of transformers' Llama."""
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_hidden_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }


def _speculators(
    config: Eagle3Config, dtype: str, target: str, target_name: str | None, draft_len: int
) -> dict[str, Any]:
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": draft_len,
        "verifier_accept_k": 1,
    }
    layer = _layer(config)
    if config.qk_norm:
        layer = {name: value for name, value in layer.items() if name != "mlp_bias"} | {"model_type": "qwen3"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        # speculators captures hidden states before these layers.
        LAYER_IDS: [tap + 1 for tap in config.taps] or None,
        "embed_requires_grad": False,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": [target], "name_or_path": target_name},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": _other_size(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "transformer_layer_config": layer | {"rope_parameters": dict(config.rope)},
    }


def _specforge(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    variants: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
    if config.taps:
        # SpecForge captures hidden states after these layers.
        variants[LAYER_IDS] = list(config.taps)
    found: dict[str, Any] = _layer(config) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": dtype,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": variants,
        **_flat_rope(config.rope),
    }
    # SpecForge's norm_output has another meaning, so the key is written only if the head needs it.
    if config.norm_output:
        found["norm_output"] = True
    if (size := _other_size(config)) is not None:
        found["target_hidden_size"] = size
    return found


def _flat_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters under the old keys and the new one: readers use different ones."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    unscaled = rope.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if unscaled else scaling,
        "rope_parameters": dict(rope),
    }


def _other_size(config: Eagle3Config) -> int | None:
    return None if config.target_hidden_size == config.hidden_size else config.target_hidden_size
