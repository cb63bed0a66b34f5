"""A decode loop as one writes it by hand for a Llama: a static cache, one compiled function, no framework around it.

After gpt-fast (pytorch-labs, 2023), over the weights of a transformers model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM


class ByHand(torch.nn.Module):
    """Greedy decoding of rows of one length.

    Args:
        model: its weights are read where they lie.
        rows, max_len: of the cache.
        compiled: options of ``torch.compile``.
    """

    def __init__(self, model: LlamaForCausalLM, rows: int, max_len: int, **compiled: Any) -> None:
        super().__init__()
        config = model.config
        self.model = model
        self.heads, self.groups, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        # Buffers, so that a CUDA graph takes their addresses for fixed.
        for index in range(config.num_hidden_layers):
            for name in ("keys", "values"):
                cache = torch.zeros(rows, self.groups, max_len, self.dim, dtype=model.dtype, device=model.device)
                self.register_buffer(f"{name}_{index}", cache, persistent=False)
        places = torch.arange(max_len, device=model.device)
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(self.get_buffer("keys_0"), places[None])
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("cos", cos[0], persistent=False)
        self.register_buffer("sin", sin[0], persistent=False)
        self.step = torch.compile(self.forward, fullgraph=True, dynamic=False, **compiled)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The next token ``[B, 1]`` of ``tokens`` ``[B, T]`` at ``positions`` ``[T]``."""
        model = self.model.model
        hidden = model.embed_tokens(tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        mask = self.places[None, :] <= positions[:, None]
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            all_keys, all_values = self.get_buffer(f"keys_{index}"), self.get_buffer(f"values_{index}")
            x = layer.input_layernorm(hidden)
            query = self._turned(self._split(attention.q_proj(x), self.heads), cos, sin)
            all_keys[:, :, positions] = self._turned(self._split(attention.k_proj(x), self.groups), cos, sin)
            all_values[:, :, positions] = self._split(attention.v_proj(x), self.groups)
            keys, values = (each.repeat_interleave(self.heads // self.groups, dim=1) for each in (all_keys, all_values))
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = self.model.lm_head(model.norm(hidden[:, -1:]))
        token: torch.Tensor = logits.argmax(-1)
        return token

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.dim)).transpose(1, 2)

    @staticmethod
    def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """int64 ``[B, P + new]``; the prompt goes through the same function, not compiled."""
        length = ids.shape[1]
        token = self.forward(ids, self.places[:length])
        position = torch.full((1,), length, device=ids.device)
        found = [token]
        for _ in range(new_tokens - 1):
            # The next replay writes over what this one returns.
            token = self.step(token, position).clone()
            position += 1
            found.append(token)
        return torch.cat([ids, *found], dim=1)
