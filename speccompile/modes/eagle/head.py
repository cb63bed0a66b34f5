"""The EAGLE head as a plain module.

Source: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024, arXiv 2401.15077),
section 4.1; SafeAILab/EAGLE, ``eagle/model/cnets1.py``. EAGLE-2 has the same head, and drafts dynamic trees with it.

Row i of the head reads the target's hidden state at position i, after the final norm, and the token at position i + 1.
Its output stands for the hidden state at position i + 1: the target's lm_head predicts the token at position i + 2 from
it, and the next draft step reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph.layer_state import KVShape
from speccompile.modes.eagle.config import EagleConfig, check_config
from speccompile.modes.network.draft_head import DraftHead, RowAttention
from speccompile.modes.network.head_attention import HeadAttention
from speccompile.modes.network.layers import MLP, RMSNorm, Rotary


class EagleLayer(nn.Module):
    """A decoder layer. The first one has no norm of its input."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = layer == 0
        if not self.first:
            self.input_layernorm = RMSNorm(size, eps)
        biases = {"bias": config.qkv_bias or config.attention_bias, "out_bias": config.attention_bias}
        self.self_attn = HeadAttention(config, size, layer, **biases)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: RowAttention) -> torch.Tensor:
        attended = hidden if self.first else self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(attended, cos, sin, cache)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class EagleHead(DraftHead):
    """An EAGLE head. Its lm_head is the target's, unless a checkpoint has one."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([EagleLayer(config, index) for index in range(config.num_hidden_layers)])
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config, "EAGLE")

    @staticmethod
    def random(model: PreTrainedModel, seed: int = 0, **fields: Any) -> EagleHead:
        """A head with random weights and the target's sizes, dtype, embedding and lm_head. ``fields`` of
        :class:`EagleConfig` override the sizes."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = EagleHead(EagleConfig.for_target(model, **fields))
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        embedding, lm_head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert isinstance(embedding, torch.Tensor) and isinstance(lm_head, torch.Tensor)
        head.share(embedding=embedding, lm_head=lm_head)
        return head.to(model.device, model.dtype).eval()

    def share(self, *, embedding: torch.Tensor | None = None, lm_head: torch.Tensor | None = None) -> None:
        """Use these weights of the target, ``[V, H]``, instead of the head's own ones."""
        for module, weight in ((self.embed_tokens, embedding), (self.lm_head, lm_head)):
            if weight is not None:
                module.weight = nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def hidden_size(self) -> int:
        """The size of the hidden state that the head reads."""
        return self.config.hidden_size

    @property
    def kv(self) -> dict[int, KVShape]:
        """The KV shapes of each layer."""
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        return {index: KVShape(shape, shape, self.fc.weight.dtype) for index in range(len(self.layers))}

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: RowAttention
    ) -> dict[str, torch.Tensor]:
        """Compute rows of the head.

        Args:
            input_ids: int64 ``[B, T]``, the token after each row's position; position_ids: ``[B, T]``, the rows'
                positions.
            hidden_states: ``[B, T, H]``, those of the target after its final norm; at draft tokens, ``hidden`` of the
                row before.

        Returns:
            ``hidden`` ``[B, T, H]``, the output of the layers, and ``logits`` ``[B, T, V]`` of the token after
                ``input_ids``.
        """
        hidden = self.fc(torch.cat([self.embed_tokens(input_ids), hidden_states], dim=-1))
        cos, sin = self.rotary(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, cache)
        return {"hidden": hidden, "logits": self.lm_head(hidden)}
