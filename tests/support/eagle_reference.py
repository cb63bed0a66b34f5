"""EAGLE's first two generations written down once more from the paper (section 4.1) and ``cnets1.py``: no cache, no
module, one row after another. What the package's head is held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from support.eagle3_reference import PlainEagle3, Weights


@dataclass
class PlainEagle:
    """The head over weights by their published names (``fc.*``, ``layers.<i>.*``), in float64."""

    weights: Weights
    heads: int
    kv_heads: int
    eps: float = 1e-6
    theta: float = 10000.0
    layers: int = 1

    def __post_init__(self) -> None:
        # Its rotary table, norms and attention, without those of its layers.
        self.parts = PlainEagle3(self.weights, self.heads, self.kv_heads, eps=self.eps, theta=self.theta)

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weights[f"{name}.weight"].double().T
        return out + self.weights[f"{name}.bias"].double() if f"{name}.bias" in self.weights else out

    def attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        length = len(x)
        query = self.parts.turned(self.linear(f"{prefix}.q_proj", x).view(length, self.heads, -1))
        key = self.parts.turned(self.linear(f"{prefix}.k_proj", x).view(length, self.kv_heads, -1))
        value = self.linear(f"{prefix}.v_proj", x).view(length, self.kv_heads, -1)
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        later = torch.arange(length) > torch.arange(length)[:, None]
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.linear(f"{prefix}.o_proj", torch.einsum("hqk,khd->qhd", shares, value).flatten(1))

    def rows(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The head's outputs ``[T, H]`` for rows of the token after theirs ``[T]``, and a hidden state ``[T, H]``."""
        embedded = self.weights["embed_tokens.weight"].double()[tokens]
        x = self.linear("fc", torch.cat([embedded, hidden], dim=-1))
        for index in range(self.layers):
            prefix = f"layers.{index}"
            attended = self.parts.norm(f"{prefix}.input_layernorm", x) if index else x
            x = x + self.attention(f"{prefix}.self_attn", attended)
            inner = self.parts.norm(f"{prefix}.post_attention_layernorm", x)
            gate = self.linear(f"{prefix}.mlp.gate_proj", inner)
            inner = gate * gate.sigmoid() * self.linear(f"{prefix}.mlp.up_proj", inner)
            x = x + self.linear(f"{prefix}.mlp.down_proj", inner)
        return x

    def draft(self, text: Sequence[int], hidden: torch.Tensor, draft_len: int) -> tuple[list[int], torch.Tensor]:
        """Draft tokens after ``text``, and the logits of each, ``[K, V]``.

        Args:
            text: n + 1 committed tokens; hidden: ``[n, H]``, the target's hidden states at the first n, after its final
                norm.
        """
        hidden, tokens = hidden.double(), list(text[1:])
        drafts: list[int] = []
        logits: list[torch.Tensor] = []
        for _ in range(draft_len):
            out = self.rows(torch.tensor(tokens), hidden)
            logits.append(self.weights["lm_head.weight"].double() @ out[-1])
            drafts.append(int(logits[-1].argmax()))
            tokens.append(drafts[-1])
            # The output of the newest row is the hidden state of the drafted token's row.
            hidden = torch.cat([hidden, out[-1:]])
        return drafts, torch.stack(logits)
