"""Differences between families of multi-token prediction (MTP) modules, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MtpVariant:
    """The structure of a family's modules. A wrong entry only reduces the number of accepted drafts, so a measurement
    must confirm each entry.

    Args:
        hidden_first: the projection reads [hidden state, embedding], not [embedding, hidden state].
        normed_target: the first module reads the target's hidden states after its final norm.
        normed_carry: the next module, or draft step, reads the output after the module's last norm.
        last_norm: a module has a norm after its layer; without one the lm_head reads the layer's output.
        config: values that replace those of the target's config in a module's layer.
    """

    hidden_first: bool = False
    normed_target: bool = True
    normed_carry: bool = True
    last_norm: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


#: DeepSeek-V3's and GLM's, as in transformers (``modeling_layers.MtpLayer``), TensorRT-LLM and SGLang.
DEEPSEEK = MtpVariant()
#: Qwen3-Next's and Qwen3.5's, as in vLLM and SGLang: the layer has full attention, also if the target's layers do not.
#: JetBrains' Mellum has the same parts, as in transformers; its config names the type of the module's layer.
QWEN = MtpVariant(config={"mlp_only_layers": [], "decoder_sparse_step": 1})
#: Xiaomi's MiMo (``MiMoMTPLayers`` in Xiaomi's code).
MIMO = MtpVariant(hidden_first=True)
#: Baidu's Ernie 4.5, as in vLLM (``ernie_mtp.py``): a dense layer, while the target has experts, and no last norm.
ERNIE = MtpVariant(last_norm=False, config={"moe_layer_start_index": 2**30})

#: The variant by ``model_type``. For other types the checkpoint's layout decides
#: (:data:`~speccompile.modes.mtp.layouts.LAYOUTS`).
VARIANTS: dict[str, MtpVariant] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "mellum": QWEN,
    "mimo": MIMO,
    "ernie4_5_moe": ERNIE,
}
