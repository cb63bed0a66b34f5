"""A Gemma 4 assistant over the KV of its target.

Source: transformers' ``Gemma4AssistantForCausalLM``, and ``SinglePositionMultiTokenCandidateGenerator`` for how it
drafts. transformers 5.23 cannot construct that class: its config refuses layers that all read other layers' KV.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import Gemma4TextConfig
from transformers.activations import ACT2FN
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextRotaryEmbedding
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.modes.network.layers import RotaryTable, rotated

#: Keys and values ``[N, S, G, D]`` by type of layer.
Caches = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class QueryAttention(nn.Module):
    """Attention of queries to the KV of a layer of the target."""

    def __init__(self, config: Gemma4TextConfig, layer: int) -> None:
        super().__init__()
        kinds = config.layer_types
        assert kinds is not None
        self.kind = kinds[layer]
        self.head_dim = config.per_layer_config[layer].head_dim
        # transformers' mask has the positions up to a distance of ``sliding_window`` from the newest KV.
        self.window = config.sliding_window + 1 if self.kind == "sliding_attention" else None
        width, bias = config.num_attention_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.q_norm = Gemma4RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        table: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
        newest: torch.Tensor,
        pages: torch.Tensor | None,
    ) -> torch.Tensor:
        query = rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), *table)
        found = torch.ops.speccompile.attention(query, *cache, slots, newest, 1.0, self.window, pages=pages)
        out: torch.Tensor = self.o_proj(found.flatten(2))
        return out


class GatedMLP(nn.Module):
    """Gemma's MLP."""

    def __init__(self, config: Gemma4TextConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act = ACT2FN[config.hidden_activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class QueryLayer(nn.Module):
    """A layer of an assistant. It computes no keys and values."""

    layer_scalar: torch.Tensor

    def __init__(self, config: Gemma4TextConfig, layer: int) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps)
        self.self_attn = QueryAttention(config, layer)
        self.mlp = GatedMLP(config)
        self.input_layernorm = Gemma4RMSNorm(*norm)
        self.post_attention_layernorm = Gemma4RMSNorm(*norm)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(*norm)
        self.post_feedforward_layernorm = Gemma4RMSNorm(*norm)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: torch.Tensor,
        tables: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        caches: Caches,
        slots: torch.Tensor,
        newest: torch.Tensor,
        pages: torch.Tensor | None,
    ) -> torch.Tensor:
        kind = self.self_attn.kind
        found = self.self_attn(self.input_layernorm(x), tables[kind], caches[kind], slots, newest, pages)
        x = x + self.post_attention_layernorm(found)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class Centroids(nn.Module):
    """Logits of the tokens of the likeliest centroids."""

    token_ordering: torch.Tensor

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        text = config.get_text_config()
        self.chosen = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(text.hidden_size, config.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(text.vocab_size))

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, V]`` of ``x`` ``[B, T, H]`` by ``weight`` ``[V, H]``; -inf outside the chosen centroids."""
        best = self.centroids(x).topk(self.chosen, dim=-1).indices
        tokens = self.token_ordering.view(len(self.centroids.weight), -1)[best].flatten(-2)
        logits = (weight[tokens] @ x[..., None])[..., 0]
        return logits.new_full((*x.shape[:-1], len(weight)), float("-inf")).scatter(-1, tokens, logits)


class AssistantLayers(nn.Module):
    """The embedding, whose weight is that of the logits too, the layers and the last norm."""

    def __init__(self, config: Gemma4TextConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([QueryLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = Gemma4RMSNorm(config.hidden_size, config.rms_norm_eps)


class Gemma4AssistantHead(nn.Module):
    """An assistant. Tensors have the names of published checkpoints.

    Args:
        config: transformers' config of the assistant.
    """

    def __init__(self, config: Gemma4AssistantConfig) -> None:
        super().__init__()
        text, outer = config.get_text_config(), config.backbone_hidden_size
        assert isinstance(text, Gemma4TextConfig) and text.layer_types is not None
        self.config = config
        self.model = AssistantLayers(text)
        self.pre_projection = nn.Linear(2 * outer, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, outer, bias=False)
        self.masked_embedding = Centroids(config) if config.use_ordered_embeddings else None
        made = Gemma4TextRotaryEmbedding(text)
        kinds = sorted(set(text.layer_types))
        tables = {
            kind: RotaryTable(getattr(made, f"{kind}_inv_freq"), getattr(made, f"{kind}_attention_scaling"))
            for kind in kinds
        }
        self.rotary = nn.ModuleDict(tables)

    def forward(
        self,
        inputs: torch.Tensor,
        position: torch.Tensor,
        caches: Caches,
        slots: torch.Tensor,
        pages: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[B, T, V]`` of the token after each row, and hidden states ``[B, T, M]`` for the next draft.

        All rows have the position of the newest committed token, and attend to the positions before it.

        Args:
            inputs: ``[B, T, 2M]``, the target's embedding of a token and the hidden state before it.
            position: int64 ``[B, 1]``; slots: ``[B]``.
            pages: int64 ``[N, P]``, where the KV is in pools of pages; None for pieces.
        """
        x = self.pre_projection(inputs)
        positions = position.expand(-1, x.shape[1])
        newest = (positions - 1).clamp(min=0).contiguous()
        tables = {kind: table(positions, x.dtype) for kind, table in self.rotary.items()}
        for layer in self.model.layers:
            x = layer(x, tables, caches, slots, newest, pages)
        x, weight = self.model.norm(x), self.model.embed_tokens.weight
        chosen = self.masked_embedding
        logits = nn.functional.linear(x, weight) if chosen is None else chosen(x, weight)
        return logits, self.post_projection(x)


class AssistantRows(nn.Module):
    """Rows of an assistant over the KV of its target.

    Args:
        embedding: the target's embedding module; layers: the target's layers whose KV it reads, by type of layer.
    """

    def __init__(self, head: Gemma4AssistantHead, embedding: nn.Module, layers: dict[str, int]) -> None:
        super().__init__()
        self.head, self.embedding, self.layers = head, embedding, layers

    @property
    def kv(self) -> tuple[str, ...]:
        """The names of the target's KV, keys and values of each type of layer."""
        return tuple(f"{part}_{layer}" for layer in self.layers.values() for part in "kv")

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        slots: torch.Tensor,
        position: torch.Tensor,
        pages: torch.Tensor | None,
        *kv: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`Gemma4AssistantHead.forward`.

        Args:
            tokens: int64 ``[B, T]``; hidden: ``[B, T, M]``; kv: :attr:`kv`, ``[N, S, G, D]``.
        """
        caches = dict(zip(self.layers, zip(kv[::2], kv[1::2], strict=True), strict=True))
        inputs = torch.cat([self.embedding(tokens), hidden], dim=-1)
        logits, carried = self.head(inputs, position, caches, slots, pages)
        return logits, carried
