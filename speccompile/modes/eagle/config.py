"""The sizes and variants of an EAGLE head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from speccompile.errors import InvalidHead


@dataclass(frozen=True)
class EagleConfig:
    """The sizes and variants of a head of EAGLE's first two generations. Its hidden size is the target's.

    Args:
        rope: transformers' ``rope_parameters``; the head's own, not the target's.
        bias: ``fc`` has a bias, as SafeAILab's heads for Llama 2 and Vicuna.
        qkv_bias: the projections of queries, keys and values have a bias, as in Qwen2's layers.
        attention_bias: they have one, and so has the attention's output.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    bias: bool = True
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @staticmethod
    def for_target(model: PreTrainedModel, **fields: Any) -> EagleConfig:
        """The config of a head with the target's sizes. ``fields`` override them."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        sizes: dict[str, Any] = dict(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
        )
        return EagleConfig(**(sizes | fields))


def check_config(config: EagleConfig) -> None:
    """Check that the values of ``config`` fit together.

    Raises:
        InvalidHead: they do not.
    """
    reason = ""
    if config.hidden_act not in ACT2FN:
        reason = f"transformers knows no activation {config.hidden_act!r}"
    elif config.num_attention_heads % config.num_key_value_heads:
        reason = f"its {config.num_attention_heads} heads cannot share {config.num_key_value_heads} keys and values"
    if reason:
        raise InvalidHead(source="EAGLE", reason=reason)


def check_target(config: EagleConfig, name: str, target: PreTrainedModel) -> None:
    """Check that a head with this config fits ``target``.

    Raises:
        InvalidHead: the head is for another target.
    """
    text = target.config.get_text_config(decoder=True)
    problems = []
    if config.vocab_size != text.vocab_size:
        problems.append(f"its vocabulary has {config.vocab_size} tokens, the target's {text.vocab_size}")
    if config.hidden_size != text.hidden_size:
        problems.append(f"it reads hidden states of size {config.hidden_size}, the target's is {text.hidden_size}")
    if problems:
        raise InvalidHead(source=name, reason=f"it is for another target: {'; '.join(problems)}")
