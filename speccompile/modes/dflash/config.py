"""The sizes and variants of a DFlash head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.graph_capture.shard_styles import whole_rows

#: The default number of taps, as in z-lab's heads.
TAPS = 5


@dataclass(frozen=True)
class DFlashConfig:
    """The sizes and variants of a head. ``hidden_size`` is the target's.

    Args:
        block_size: tokens of a block: the newest token and ``block_size - 1`` mask tokens. Each mask token becomes a
            draft token, see also ``sample_from_anchor``.
        mask_token_id: the token whose embedding (the target's) is the input at a mask token.
        taps: the target's decoder layers whose outputs the head reads, in the order in which ``fc`` reads them. The
            last layer's output is read after the final norm, as transformers reports it.
        rope: transformers' ``rope_parameters``; the head's own, not the target's.
        windows: for each layer, the number of positions up to its own that a query attends to; in a layer that is not
            causal, also the same number from its own position on. None is all positions. Empty means None for every
            layer.
        causal: for each layer, whether a query attends only to positions up to its own in the block. Empty means False
            for every layer.
        embedding_scale: a factor on the target's embedding weights.
        logit_scale: a factor on the logits.
        logit_softcap: the limit of the scaled logits; None for no limit.
        sample_from_anchor: the output at each token of the block, the newest one included, predicts the token after it:
            a block has ``block_size`` draft tokens. Otherwise the output at a mask token predicts the token of that
            position.
        draft_vocab_size: Vd, tokens that the head can draft, with an own lm_head; None is the target's
            vocabulary and lm_head.
        markov_rank: the rank of the bias by the token before, see :class:`~speccompile.modes.dflash.markov.MarkovHead`;
            0 for none.
        conv_kernel_size: taps of the convolutions over a block (DFlash2), see
            :class:`~speccompile.modes.dflash.convolution.BlockConvolution`; 0 for none.
        conv_group_size: channels that share a number of their kernels.
        selector_rank: the rank of the choice among the likeliest tokens (DFlash2), see
            :class:`~speccompile.modes.dflash.selector.CandidateSelector`; 0 for none.
        selector_top_k: the number of these tokens.
        gru_hidden_dim: the size of the state that follows the drafts of a block (Domino), see
            :class:`~speccompile.modes.dflash.domino.DominoHead`; 0 for none.
        emb_dim: the inner size of its projection.
        pure_draft_prefix_len: drafts whose logits it does not correct.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()
    causal: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    gru_hidden_dim: int = 0
    emb_dim: int = 256
    pure_draft_prefix_len: int = 0

    @property
    def most_drafts(self) -> int:
        """The number of draft tokens of a block. Engines draft one token less with Domino heads."""
        return self.block_size if self.sample_from_anchor and not self.gru_hidden_dim else self.block_size - 1

    @property
    def trainable(self) -> bool:
        """Whether :mod:`speccompile.training` supports such a head: no windows, logits without a scale or cap, and none
        of the parts of DFlash2 and Domino."""
        plain = (self.logit_scale, self.logit_softcap) == (1.0, None)
        return plain and not (any(self.windows) or self.conv_kernel_size or self.selector_rank or self.gru_hidden_dim)

    @property
    def follows_drafts(self) -> bool:
        """Whether the logits of a draft depend on the draft before it."""
        return bool(self.markov_rank or self.selector_rank or self.gru_hidden_dim)

    def window(self, layer: int) -> int | None:
        """The window of a layer; None for no window."""
        return self.windows[layer] if self.windows else None

    def is_causal(self, layer: int) -> bool:
        """Whether a layer is causal."""
        return self.causal[layer] if self.causal else False

    def layer_keys(self) -> dict[str, Any]:
        """The sizes of the layers by transformers' names, which all layouts write."""
        return {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": self.hidden_act,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": dict(self.rope),
        }

    @staticmethod
    def for_target(model: PreTrainedModel, mask_token_id: int, **fields: Any) -> DFlashConfig:
        """The config of a head with the target's sizes. ``fields`` override them."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        sizes: dict[str, Any] = dict(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            block_size=8,
            mask_token_id=mask_token_id,
            taps=spread_taps(len(decoder_layers(model)[1])),
            embedding_scale=embedding_scale(model.get_input_embeddings()),
        )
        return DFlashConfig(**(sizes | fields))


def embedding_scale(embedding: nn.Module) -> float:
    """The factor that an embedding module puts on its weights (Gemma)."""
    return float(getattr(embedding, "embed_scale", 1.0))


def spread_taps(num_layers: int, count: int = TAPS) -> tuple[int, ...]:
    """``count`` layers of a target with ``num_layers``, spread from the second to the fourth-last one; fewer if the
    target is too small."""
    first, last = min(1, num_layers - 1), max(num_layers - 4, min(1, num_layers - 1))
    return tuple(sorted({round(first + (last - first) * index / (count - 1)) for index in range(count)}))


def check_config(config: DFlashConfig, source: str) -> None:
    """Check that the values of ``config`` fit together.

    Raises:
        InvalidHead: they do not.
    """

    def refuse(reason: str) -> None:
        raise InvalidHead(source=source, reason=reason)

    layers = config.num_hidden_layers
    if config.block_size < 2:
        refuse(f"its block_size must be at least 2, got {config.block_size}")
    if config.markov_rank < 0:
        refuse(f"its markov_rank must be at least 0, got {config.markov_rank}")
    if config.conv_kernel_size > config.block_size:
        refuse(f"its conv_kernel_size {config.conv_kernel_size} is more than its block_size {config.block_size}")
    if config.conv_kernel_size and config.hidden_size % config.conv_group_size:
        refuse(f"its conv_group_size {config.conv_group_size} does not divide its hidden_size {config.hidden_size}")
    if config.selector_rank and (config.sample_from_anchor or config.draft_vocab_size or config.markov_rank):
        refuse("it has a candidate selector with a draft vocabulary, a markov_rank or sample_from_anchor")
    if config.gru_hidden_dim and (config.markov_rank or config.selector_rank):
        refuse("it has Domino's correction with a markov_rank or a candidate selector")
    if not config.taps:
        refuse("it names no layers of the target to read (target_layer_ids)")
    if config.hidden_act not in ACT2FN:
        refuse(f"transformers knows no activation {config.hidden_act!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        refuse(f"its {config.num_attention_heads} heads cannot share {config.num_key_value_heads} KV heads")
    if layers < 1:
        refuse("it has no layer")
    for what, given in (("sliding windows", config.windows), ("causal", config.causal)):
        if given and len(given) != layers:
            refuse(f"it has {layers} layers, and {what} of {len(given)}")
    if any(window is not None and window < 1 for window in config.windows):
        refuse(f"its sliding windows {list(config.windows)} must be None or sizes")


def check_target(config: DFlashConfig, source: str, target: PreTrainedModel) -> None:
    """Check that a head with this config fits ``target``.

    Raises:
        InvalidHead: the head is for another target.
    """
    text = target.config.get_text_config(decoder=True)
    layers = len(decoder_layers(target)[1])
    tokens = whole_rows(target.get_input_embeddings())
    problems = []
    if config.hidden_size != text.hidden_size:
        problems.append(f"its hidden states are of size {config.hidden_size}, the target's of {text.hidden_size}")
    if not all(0 <= tap < layers for tap in config.taps):
        problems.append(f"it reads the outputs of layers {list(config.taps)}, and the target has 0 .. {layers - 1}")
    if config.draft_vocab_size is not None and not 1 <= config.draft_vocab_size < tokens:
        problems.append(
            f"its draft_vocab_size is {config.draft_vocab_size}, and must be less than the target's {tokens} tokens, "
            "or None for all of them"
        )
    if not 0 <= config.mask_token_id < tokens:
        problems.append(f"its mask token is {config.mask_token_id}, and the target embeds {tokens} tokens")
    if problems:
        raise InvalidHead(source=source, reason=f"it is for another target: {'; '.join(problems)}")
