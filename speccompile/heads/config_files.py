"""What the config.json of a published EAGLE-3 head says, in either of the two layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead, told
from speccompile.graph_capture.support import decoder_layers
from speccompile.heads.eagle3_config import Eagle3Config, default_taps

#: Variants that are other networks, by the key that asks for them.
REFUSED = {
    "eh_proj_before_attn": "a projection in front of the attention",
    "next_layer_regular": "layers of another kind behind the first",
    "parallel_drafting": "drafting of all tokens at once",
    "kv_lora_rank": "latent attention",
}


def read_config(folder: Path, name: str, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> Eagle3Config:
    """The config of a head for ``target``.

    Of the flat layout (SafeAILab, SpecForge) all keys are at the top, or in ``eagle_config``; of speculators', sizes
    are in ``transformer_layer_config``. Variants that the config leaves out are seen from the ``tensors``: biases and
    ``fc_norm``. A key that is absent means EAGLE-3's own behaviour: the hidden state is carried on in front of the last
    norm. ``norm_output`` means what it means to speculators, SGLang and TensorRT-LLM.

    Raises:
        InvalidHead: a key is missing, or the head is of another kind or another target.
    """
    given = _read(folder / "config.json", name)
    kind = given.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise InvalidHead(source=name, reason=f"it is a head of type {kind!r}, not 'eagle3'")
    keys: dict[str, Any] = {}
    for part in ("transformer_layer_config", "eagle_config"):
        value = given.get(part) or {}
        if not isinstance(value, dict):
            raise InvalidHead(source=name, reason=f"its config says {part}={value!r}, which has to be an object")
        keys |= value
    keys |= given
    for key, what in REFUSED.items():
        # TensorRT-LLM's default of this one is True, and says something of heads with several layers alone.
        if keys.get(key) and not (key == "next_layer_regular" and _layers(keys) == 1):
            raise InvalidHead(
                source=name, reason=f"its config has {key}={keys[key]!r} ({what}), which is not supported"
            )
    config = _config(keys, name, target, tensors)
    check_target(config, name, target)
    return config


def _config(
    keys: Mapping[str, Any], name: str, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> Eagle3Config:
    def size(key: str, default: Any = None) -> int:
        value = keys.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidHead(source=name, reason=f"its config says {key}={value!r}, which has to be a size")
        return value

    def number(key: str, default: float) -> float:
        value = default if keys.get(key) is None else keys[key]
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise InvalidHead(source=name, reason=f"its config says {key}={value!r}, which has to be a number above 0")
        return float(value)

    def flag(key: str) -> bool:
        value = keys.get(key)
        if not (value is None or isinstance(value, bool)):
            raise InvalidHead(source=name, reason=f"its config says {key}={value!r}, which has to be true or false")
        return bool(value)

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    vocab = size("vocab_size")
    layers = size("num_hidden_layers", 1)
    taps = keys.get("eagle_aux_hidden_state_layer_ids")
    target_layers = len(decoder_layers(target)[1])
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise InvalidHead(source=name, reason=f"its config has the rotary parameters {rope!r}, which are no object")
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=size("target_hidden_size", hidden),
        intermediate_size=size("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads) if keys.get("head_dim") is not None else hidden // heads,
        vocab_size=vocab,
        draft_vocab_size=size("draft_vocab_size", vocab),
        num_hidden_layers=layers,
        rms_norm_eps=number("rms_norm_eps", 1e-6),
        hidden_act=str(keys.get("hidden_act", "silu")),
        max_position_embeddings=size("max_position_embeddings", 2048),
        rope=_rope(rope, number("rope_theta", 10000.0)),
        taps=_taps(taps, name) if taps else default_taps(target_layers),
        bias=flag("bias") or "fc.bias" in tensors,
        attention_bias=flag("attention_bias") or "layers.0.self_attn.q_proj.bias" in tensors,
        mlp_bias=flag("mlp_bias") or "layers.0.mlp.gate_proj.bias" in tensors,
        fc_norm=flag("fc_norm") or flag("use_aux_norm") or "fc_norm.0.weight" in tensors,
        norm_before_fc=flag("norm_before_fc") or "input_norm.weight" in tensors,
        norm_before_residual=flag("norm_before_residual"),
        norm_output=flag("norm_output") or flag("return_hidden_post_norm"),
        tie_word_embeddings=flag("tie_word_embeddings"),
    )


def _taps(value: Any, name: str) -> tuple[int, ...]:
    good = isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
    if not good:
        reason = f"its config says eagle_aux_hidden_state_layer_ids={value!r}, which has to be a list of layers"
        raise InvalidHead(source=name, reason=reason)
    return tuple(sorted(value))


def _rope(given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """transformers 5 writes ``rope_parameters``, which ``rope_theta`` and ``rope_scaling`` were before. Without any the
    base is 10000: heads do not inherit the target's."""
    rope = dict(given)
    # Of old files.
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", theta)
    return rope


def _layers(keys: Mapping[str, Any]) -> Any:
    return keys.get("num_hidden_layers", 1)


def check_target(config: Eagle3Config, name: str, target: PreTrainedModel) -> None:
    """Raises InvalidHead: a head of that config was made for another target."""
    text = target.config.get_text_config(decoder=True)
    layers = len(decoder_layers(target)[1])
    problems = []
    if config.vocab_size != text.vocab_size:
        problems.append(f"its vocabulary has {config.vocab_size} tokens, the target's {text.vocab_size}")
    if config.target_hidden_size != text.hidden_size:
        problems.append(
            f"it reads hidden states of size {config.target_hidden_size}, the target's is {text.hidden_size}"
        )
    if config.taps and not (config.taps[0] >= 0 and config.taps[-1] < layers):
        problems.append(f"it reads layers {list(config.taps)}, and the target has 0 .. {layers - 1}")
    if problems:
        raise InvalidHead(source=name, reason=f"it was made for another target: {'; '.join(problems)}")


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidHead(source=name, reason=f"{path.name} cannot be read: {told(error)}") from error
    if not isinstance(found, dict):
        raise InvalidHead(source=name, reason=f"{path.name} is no JSON object")
    return found
