"""The EAGLE-3 head as a plain module.

After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
Row i of the head reads the target's hidden states at position i and the token at position i + 1, and says which token
comes at i + 2. Its KV of row i lies at place i.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.errors import InvalidHead, told
from speccompile.graph_capture.draft_head import DraftHead, HeadCache
from speccompile.graph_capture.state import KVShape
from speccompile.sampling.draft_vocab import target_ids

#: Rotary tables of these kinds change with the length of the text.
CHANGING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Eagle3Config:
    """The sizes and variants of a head. H is its own hidden size, Ht the target's.

    Args:
        taps: the target's decoder layers whose outputs it reads, ascending; empty for the default three.
        rope: transformers' ``rope_parameters``; the head's own, not the target's.
        fc_norm: an RMSNorm for each tapped state, in front of ``fc`` (EAGLE-3.1). ``norm_before_fc``: one over all.
        norm_before_residual: the residual is the hidden state behind ``hidden_norm``, not in front of it.
        norm_output: the next draft step reads the hidden state behind the last norm, not in front of it.
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

    @property
    def tapped(self) -> int:
        """How many hidden states it reads."""
        return len(self.taps) or 3

    @staticmethod
    def for_target(model: PreTrainedModel, **fields: Any) -> Eagle3Config:
        """A head of the target's own sizes and vocabulary, with these ``fields`` instead."""
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


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE-3 reads of a target of L layers: an early, a middle and a late one.

    Raises:
        InvalidHead: there are too few.
    """
    if num_layers <= 5:
        reason = f"the usual three layers exist in targets of more than 5, and this one has {num_layers}"
        raise InvalidHead(source="EAGLE-3", reason=f"{reason}; name them in eagle_aux_hidden_state_layer_ids")
    return (1, num_layers // 2 - 1, num_layers - 4)


class RMSNorm(nn.Module):
    """Computed in float32, as Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Sines and cosines of positions, by any of transformers' rules that does not change with the text's length."""

    inv_freq: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        if config.rope.get("rope_type", "default") in CHANGING_ROPE:
            reason = f"its rotary table ({config.rope['rope_type']}) changes with the length of the text"
            raise InvalidHead(source="EAGLE-3", reason=reason)
        try:
            table = LlamaRotaryEmbedding(
                LlamaConfig(
                    # It knows no head whose attention is wider than its hidden states.
                    hidden_size=config.num_attention_heads * config.head_dim,
                    num_attention_heads=config.num_attention_heads,
                    head_dim=config.head_dim,
                    max_position_embeddings=config.max_position_embeddings,
                    rope_parameters=dict(config.rope),
                )
            )
        except Exception as error:
            reason = f"transformers cannot make its rotary table of {dict(config.rope)}: {told(error)}"
            raise InvalidHead(source="EAGLE-3", reason=reason) from error
        self.scaling = float(table.attention_scaling)
        self.register_buffer("inv_freq", table.inv_freq.float().clone(), persistent=False)

    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """``position_ids`` ``[B, T]``; cosines and sines ``[B, T, 1, D]``."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``[B, T, heads, D]``, halves turned against each other as in Llama."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config, inputs: int, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, bias = layer, config.head_dim, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: HeadCache) -> torch.Tensor:
        query = rotated(self._heads(self.q_proj(x)), cos, sin)
        key = rotated(self._heads(self.k_proj(x)), cos, sin)
        value = self._heads(self.v_proj(x))
        attended = cache.attend(self.layer, query, key, value, self.head_dim**-0.5)
        out: torch.Tensor = self.o_proj(attended.flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer. The first one attends over [embedding, hidden state], each behind a norm of its own."""

    def __init__(self, config: Eagle3Config, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        if self.first:
            self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config, 2 * size if self.first else size, layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: HeadCache
    ) -> torch.Tensor:
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            attended = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            residual = normed if self.norm_before_residual else hidden
        else:
            attended = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(attended, cos, sin, cache)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(DraftHead):
    """``d2t`` ``[Vd]``: draft token i is the target's ``i + d2t[i]``; None where the vocabularies are one."""

    d2t: torch.Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        _check(config)
        self.config = config
        size, read = config.hidden_size, config.tapped * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if config.fc_norm:
            norms = [RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(config.tapped)]
            self.fc_norm = nn.ModuleList(norms)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(read, config.rms_norm_eps)
        self.fc = nn.Linear(read, size, bias=config.bias)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = Rotary(config)
        mapped = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None)

    @staticmethod
    def random(model: PreTrainedModel, seed: int = 0, **fields: Any) -> Eagle3Head:
        """One with random weights, of the target's sizes (``fields`` of :class:`Eagle3Config` aside) and dtype, which
        shares the target's embedding. Its vocabulary are tokens drawn from the target's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = Eagle3Head(Eagle3Config.for_target(model, **fields))
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if head.d2t is not None:
                size = head.config.draft_vocab_size
                head.d2t = torch.randperm(head.config.vocab_size)[:size].sort().values - torch.arange(size)
        if head.config.hidden_size == head.config.target_hidden_size and not head.config.tie_word_embeddings:
            embedding = model.get_input_embeddings().weight
            assert isinstance(embedding, torch.Tensor)
            head.share(embedding=embedding)
        return head.to(model.device, model.dtype).eval()

    def with_taps(self, taps: tuple[int, ...]) -> Eagle3Head:
        """The same weights, over the outputs of these layers."""
        head = copy.copy(self)
        head.config = replace(self.config, taps=taps)
        return head

    def share(self, *, embedding: torch.Tensor | None = None, lm_head: torch.Tensor | None = None) -> None:
        """Read these weights of the target, ``[V, H]``, instead of own ones."""
        for module, weight in ((self.embed_tokens, embedding), (self.lm_head, lm_head)):
            if weight is not None:
                module.weight = nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def hidden_size(self) -> int:
        """Of the hidden states that it reads, side by side."""
        return self.config.tapped * self.config.target_hidden_size

    @property
    def kv(self) -> dict[int, KVShape]:
        """What each layer puts into the cache."""
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        return {index: KVShape(shape, shape, self.fc.weight.dtype) for index in range(len(self.layers))}

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """Rows of the head.

        Args:
            input_ids: int64 ``[B, T]``, the token behind each row's; position_ids: ``[B, T]``, the rows' own.
            hidden_states: ``[B, T, 3 * Ht]``, tapped at the rows' own positions.

        Returns:
            ``fused`` ``[B, T, H]``, what stands for the hidden states, and of draft tokens is replaced by what
            the row in front ``carried``; ``hidden`` ``[B, T, H]``, what the layers leave; ``carried`` ``[B, T, H]``;
            ``logits`` ``[B, T, Vd]`` of the token behind ``input_ids``, and as ``target_logits`` ``[B, T, V]`` the same
            over the target's vocabulary, -inf where the draft vocabulary has no token.
        """
        fused = self._fused(hidden_states)
        embedded = self.embed_tokens(input_ids)
        cos, sin = self.rotary(position_ids, fused.dtype)
        hidden = fused
        for layer in self.layers:
            hidden = layer(embedded, hidden, cos, sin, cache)
        normed = self.norm(hidden)
        logits = self.lm_head(normed)
        named = {"fused": fused, "hidden": hidden, "logits": logits}
        if self.d2t is not None:
            whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
            named["target_logits"] = whole.index_copy(-1, target_ids(self.d2t), logits)
        if self.config.norm_output:
            named["carried"] = normed
        return named

    def _fused(self, tapped: torch.Tensor) -> torch.Tensor:
        if self.config.fc_norm:
            chunks = tapped.chunk(self.config.tapped, dim=-1)
            tapped = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            tapped = self.input_norm(tapped)
        fused: torch.Tensor = self.fc(tapped)
        return fused


def _check(config: Eagle3Config) -> None:
    def refuse(reason: str) -> None:
        raise InvalidHead(source="EAGLE-3", reason=reason)

    if config.fc_norm and config.norm_before_fc:
        refuse("it has both fc_norm and norm_before_fc, of which a head has one")
    if config.draft_vocab_size > config.vocab_size:
        refuse(f"its draft vocabulary ({config.draft_vocab_size}) is larger than the target's ({config.vocab_size})")
    if config.tie_word_embeddings and config.draft_vocab_size != config.vocab_size:
        refuse("it ties lm_head and embedding, which are of different vocabularies")
    if list(config.taps) != sorted(config.taps):
        refuse(f"its layers {list(config.taps)} are not ascending")
    if config.hidden_act not in ACT2FN:
        refuse(f"transformers knows no activation {config.hidden_act!r}")
    if config.num_hidden_layers < 1:
        refuse("it has no layer")
