"""The EAGLE-3 head as a plain module.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).

Row i of the head reads the target's hidden states at position i and the token at position i + 1. It predicts the token
at position i + 2. The KV of row i is stored at position i.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph.layer_state import KVShape
from speccompile.modes.eagle3.config import Eagle3Config, check_config
from speccompile.modes.network.draft_head import DraftHead, RowAttention
from speccompile.modes.network.head_attention import HeadAttention
from speccompile.modes.network.layers import MLP, RMSNorm, Rotary
from speccompile.sampling.draft_vocab import target_ids


class Layer(nn.Module):
    """A decoder layer. The input of the first layer's attention is [embedding, hidden state], each after its own
    norm."""

    def __init__(self, config: Eagle3Config, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = layer == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        if self.first:
            self.hidden_norm = RMSNorm(size, eps)
        inputs = 2 * size if self.first else size
        self.self_attn = HeadAttention(config, inputs, layer, bias=config.attention_bias, qk_norm=config.qk_norm)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config, bias=config.mlp_bias)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: RowAttention,
        window: int | None,
    ) -> torch.Tensor:
        residual = hidden
        if self.first:
            normed = self.hidden_norm(hidden)
            attended = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
            residual = normed if self.norm_before_residual else hidden
        else:
            attended = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(attended, cos, sin, cache, window)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Head(DraftHead):
    """An EAGLE-3 head.

    Attributes:
        d2t: int64 ``[Vd]``: draft token i is the target's token ``i + d2t[i]``. None if the head has the target's
            vocabulary.
    """

    d2t: torch.Tensor | None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        size, read = config.hidden_size, config.tapped * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        #: Whether ``embed_tokens`` has the target's own tensor.
        self.shares_embedding = False
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
        self.rotary = Rotary(config, "EAGLE-3")
        if config.mask_token_id is not None:
            # Replaces the target's hidden states at positions that the target has not read.
            self.mask_hidden = nn.Parameter(torch.zeros(1, read))
        mapped = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None)

    @staticmethod
    def random(model: PreTrainedModel, seed: int = 0, **fields: Any) -> Eagle3Head:
        """A head with random weights and the target's sizes, dtype and embedding. ``fields`` of :class:`Eagle3Config`
        override the sizes.

        A smaller draft vocabulary is a random part of the target's.
        """
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
        """A head with the same weights that reads the outputs of these layers."""
        return self._with(taps=taps)

    def for_texts(self, max_len: int) -> Eagle3Head:
        """The head for sequences of up to ``max_len`` tokens. Windows that are not shorter are removed."""
        if not self.config.windows:
            return self
        windows = tuple(None if window is None or window >= max_len else window for window in self.config.windows)
        return self._with(windows=windows if any(windows) else ())

    def _with(self, **fields: Any) -> Eagle3Head:
        head = copy.copy(self)
        head.config = replace(self.config, **fields)
        return head

    def share(self, *, embedding: torch.Tensor | None = None, lm_head: torch.Tensor | None = None) -> None:
        """Use these weights of the target, ``[V, H]``, instead of the head's own ones."""
        self.shares_embedding = self.shares_embedding or embedding is not None
        for module, weight in ((self.embed_tokens, embedding), (self.lm_head, lm_head)):
            if weight is not None:
                module.weight = nn.Parameter(weight.detach(), requires_grad=False)

    @property
    def hidden_size(self) -> int:
        """The size of the concatenated hidden states that the head reads."""
        return self.config.tapped * self.config.target_hidden_size

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
            hidden_states: ``[B, T, 3 * Ht]``, tapped at the rows' positions.

        Returns:
            Values by name. Those that the config does not need are absent.

            - ``fused`` ``[B, T, H]``: the projection of the hidden states. At draft tokens, passes replace it by
              ``carried`` of the row before.
            - ``hidden`` ``[B, T, H]``: the output of the layers.
            - ``carried`` ``[B, T, H]``: the input of the next draft step, if it is not ``hidden``.
            - ``logits`` ``[B, T, Vd]`` of the token after ``input_ids``.
            - ``target_logits`` ``[B, T, V]``: the logits over the target's vocabulary, -inf at tokens that the draft
              vocabulary does not have.
            - ``target_ids`` ``[Vd]``: the target's ids of all draft tokens.
            - ``mask_fused`` ``[1, 1, H]``: ``fused`` of mask tokens.
        """
        fused = self.fuse(hidden_states)
        hidden = self.read(input_ids, position_ids, fused, cache)
        normed = self.norm(hidden)
        logits = self.lm_head(normed)
        named = {"fused": fused, "hidden": hidden, "logits": logits}
        if self.d2t is not None:
            whole = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
            named["target_ids"] = target_ids(self.d2t)
            named["target_logits"] = whole.index_copy(-1, named["target_ids"], logits)
        if self.config.norm_output:
            named["carried"] = normed
        if self.config.mask_token_id is not None:
            named["mask_fused"] = self.fuse(self.mask_hidden[None])
        return named

    # --- parts of the forward, which training also calls ------------------------------------

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The projection ``[B, T, H]`` of tapped hidden states ``[B, T, 3 * Ht]``."""
        if self.config.fc_norm:
            chunks = hidden_states.chunk(self.config.tapped, dim=-1)
            hidden_states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            hidden_states = self.input_norm(hidden_states)
        fused: torch.Tensor = self.fc(hidden_states)
        return fused

    def read(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor, cache: RowAttention
    ) -> torch.Tensor:
        """The output of the layers, ``[B, T, H]``.

        Args:
            hidden: ``[B, T, H]``, the result of :meth:`fuse`, or at draft tokens that of :meth:`carry`.
        """
        embedded = self.embed_tokens(input_ids)
        cos, sin = self.rotary(position_ids, hidden.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(embedded, hidden, cos, sin, cache, self.config.window(index))
        return hidden

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the next draft step ``[B, T, H]``, from the output of the layers."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., Vd]`` of the output of the layers."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden))
        return logits
