"""What differs between families of multi-token prediction (MTP) modules: as data, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MtpVariant:
    """How a family's modules are put together. A wrong entry costs accepted drafts and nothing else: texts are the
    target's in any case, so only a measurement can decide.

    Args:
        hidden_first: the projection reads [hidden state, embedding], not [embedding, hidden state].
        normed_target: the first module reads the target's hidden states after its final norm.
        normed_carry: what is carried on to the next module, or step, is the output after the module's last norm.
        last_norm: a module has a norm after its layer; without one the lm_head reads the layer's output.
        config: fields of the target's config that are others in a module's layer.
    """

    hidden_first: bool = False
    normed_target: bool = True
    normed_carry: bool = True
    last_norm: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)


#: DeepSeek-V3's, as transformers (``modeling_layers.MtpLayer``), TensorRT-LLM and SGLang run it; and GLM's.
DEEPSEEK = MtpVariant()
#: Qwen3-Next's and Qwen3.5's, as vLLM and SGLang run it: the layer attends fully, also where the target's do not.
#: JetBrains' Mellum has the same parts, as transformers runs it; its config names the type of the module's layer.
QWEN = MtpVariant(config={"mlp_only_layers": [], "decoder_sparse_step": 1})
#: Xiaomi's MiMo (``MiMoMTPLayers`` of its own code).
MIMO = MtpVariant(hidden_first=True)
#: Baidu's Ernie 4.5, as vLLM runs it (``ernie_mtp.py``): a dense layer beside a target of experts, and no last norm.
ERNIE = MtpVariant(last_norm=False, config={"moe_layer_start_index": 2**30})

#: By ``model_type``; where a type is not listed, its checkpoint's layout decides (:data:`LAYOUTS` of mtp_layouts.py).
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
