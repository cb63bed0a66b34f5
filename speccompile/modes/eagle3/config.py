"""The sizes and variants of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from speccompile.errors import InvalidHead

#: The tap of the input of layer 0, as if it were the output of a layer -1.
EMBEDDING = -1


@dataclass(frozen=True)
class Eagle3Config:
    """The sizes and variants of a head. H is its own hidden size, Ht the target's.

    Args:
        taps: the target's decoder layers whose outputs the head reads, ascending; :data:`EMBEDDING` is the input of the
            first layer. Empty for the three default layers.
        rope: transformers' ``rope_parameters``; the head's own, not the target's.
        fc_norm: an RMSNorm for each tapped state, before ``fc`` (EAGLE-3.1).
        norm_before_fc: one RMSNorm over all tapped states, before ``fc``.
        norm_before_residual: the residual is the hidden state after ``hidden_norm``, not before it.
        norm_output: the next draft step reads the hidden state after the last norm, not before it.
        qk_norm: queries and keys have an RMSNorm over each head, as in Qwen3's layers.
        windows: for each layer, the number of rows that a query attends to, including its own; None is all of them.
            Empty means None for every layer.
        mask_token_id: for a head that drafts all tokens at once (P-EAGLE): the token that is read at the position of
            each draft after the first one. None for other heads.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    taps: tuple[int, ...] = ()
    bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    mask_token_id: int | None = None

    @property
    def tapped(self) -> int:
        """The number of hidden states that the head reads."""
        return len(self.taps) or 3

    @property
    def trainable(self) -> bool:
        """Whether :mod:`speccompile.training` supports such a head: one layer without a sliding window, which drafts a
        chain from the outputs of decoder layers."""
        chain = self.num_hidden_layers == 1 and self.mask_token_id is None
        return chain and not any(self.windows) and EMBEDDING not in self.taps

    def window(self, layer: int) -> int | None:
        """The window of a layer; None for no window."""
        return self.windows[layer] if self.windows else None

    @staticmethod
    def for_target(model: PreTrainedModel, **fields: Any) -> Eagle3Config:
        """The config of a head with the target's sizes and vocabulary. ``fields`` override them."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        sizes: dict[str, Any] = dict(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            draft_vocab_size=config.vocab_size,
        )
        return Eagle3Config(**(sizes | fields))


def check_config(config: Eagle3Config) -> None:
    """Check that the values of ``config`` fit together.

    Raises:
        InvalidHead: they do not.
    """

    def refuse(reason: str) -> None:
        raise InvalidHead(source="EAGLE-3", reason=reason)

    if config.fc_norm and config.norm_before_fc:
        refuse("it must not have both fc_norm and norm_before_fc")
    if config.draft_vocab_size > config.vocab_size:
        refuse(f"its draft vocabulary ({config.draft_vocab_size}) is larger than the target's ({config.vocab_size})")
    if config.tie_word_embeddings and config.draft_vocab_size != config.vocab_size:
        refuse("it ties lm_head and embedding, which are of different vocabularies")
    if list(config.taps) != sorted(config.taps):
        refuse(f"its layers {list(config.taps)} are not ascending")
    if config.hidden_act not in ACT2FN:
        refuse(f"transformers knows no activation {config.hidden_act!r}")
    if not (config.mask_token_id is None or 0 <= config.mask_token_id < config.vocab_size):
        refuse(f"its mask token is {config.mask_token_id}, and its vocabulary has {config.vocab_size} tokens")
    if config.num_hidden_layers < 1:
        refuse("it has no layer")
    if config.windows and len(config.windows) != config.num_hidden_layers:
        refuse(f"it has {config.num_hidden_layers} layers and sliding windows of {len(config.windows)}")
    if any(window is not None and window < 1 for window in config.windows):
        refuse(f"its sliding windows {list(config.windows)} must be None or sizes")
