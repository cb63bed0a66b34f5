"""EAGLE-3 written down once more from the paper: no cache, no module, one row after another. What the package's head is
held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]


@dataclass
class PlainEagle3:
    """The head over weights by their published names (``midlayer.*``; of more layers ``layers.<i>.*``)."""

    weights: Weights
    heads: int
    kv_heads: int
    eps: float = 1e-6
    theta: float = 10000.0
    layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False
    seen: list[str] = field(default_factory=list)

    def weight(self, name: str) -> torch.Tensor:
        self.seen.append(name)
        return self.weights[name].double()

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight(f"{name}.weight")

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight(f"{name}.weight").T

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, heads, D]``: each pair (i, i + D/2) turned by position * theta^(-2i/D)."""
        size = x.shape[-1]
        speeds = self.theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x.shape[0], dtype=torch.float64)[:, None, None] * speeds
        turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(*x.split(size // 2, dim=-1))
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[0]
        query = self.turned(self.linear(f"{prefix}.q_proj", x).view(length, self.heads, -1))
        key = self.turned(self.linear(f"{prefix}.k_proj", x).view(length, self.kv_heads, -1))
        value = self.linear(f"{prefix}.v_proj", x).view(length, self.kv_heads, -1)
        shared = self.heads // self.kv_heads
        outputs = torch.zeros_like(query)
        for row in range(length):
            for head in range(self.heads):
                scores = key[: row + 1, head // shared] @ query[row, head] / query.shape[-1] ** 0.5
                outputs[row, head] = scores.softmax(0) @ value[: row + 1, head // shared]
        return self.linear(f"{prefix}.o_proj", outputs.flatten(1))

    def layer(self, index: int, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        prefix = "midlayer" if self.layers == 1 else f"layers.{index}"
        attended = residual = hidden
        if index == 0:
            normed = self.norm(f"{prefix}.hidden_norm", hidden)
            attended = torch.cat([self.norm(f"{prefix}.input_layernorm", embedded), normed], dim=-1)
            residual = normed if self.norm_before_residual else hidden
        else:
            attended = self.norm(f"{prefix}.input_layernorm", hidden)
        middle = residual + self.attention(f"{prefix}.self_attn", attended)
        x = self.norm(f"{prefix}.post_attention_layernorm", middle)
        gate = self.linear(f"{prefix}.mlp.gate_proj", x)
        return middle + self.linear(
            f"{prefix}.mlp.down_proj", gate * gate.sigmoid() * self.linear(f"{prefix}.mlp.up_proj", x)
        )

    def fused(self, low: torch.Tensor, middle: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Three hidden states ``[T, Ht]`` as one, ``[T, H]``."""
        states = [low.double(), middle.double(), high.double()]
        if "fc_norm.0.weight" in self.weights:
            states = [self.norm(f"fc_norm.{index}", state) for index, state in enumerate(states)]
        together = torch.cat(states, dim=-1)
        if "input_norm.weight" in self.weights:
            together = self.norm("input_norm", together)
        return self.linear("fc", together)

    def rows(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[T, Vd]`` and what is carried on ``[T, H]``, of rows that have the token after theirs ``[T]``."""
        embedded = self.weight("embed_tokens.weight")[tokens]
        for index in range(self.layers):
            hidden = self.layer(index, embedded, hidden)
        normed = self.norm("norm", hidden)
        return self.linear("lm_head", normed), normed if self.norm_output else hidden

    def token(self, logits: torch.Tensor) -> int:
        """The target's id of the likeliest draft token."""
        drafted = int(logits.argmax())
        return drafted + int(self.weights["d2t"][drafted]) if "d2t" in self.weights else drafted

    def draft(
        self, text: Sequence[int], states: Sequence[torch.Tensor], draft_len: int
    ) -> tuple[list[int], torch.Tensor]:
        """Draft tokens after ``text``, and the logits of each, ``[K, Vd]``.

        Args:
            text: n + 1 committed tokens; states: the three hidden states of its first n, ``[n, Ht]`` each.
        """
        hidden = self.fused(*states)
        tokens = list(text[1:])
        drafts: list[int] = []
        logits: list[torch.Tensor] = []
        for _ in range(draft_len):
            row_logits, carried = self.rows(torch.tensor(tokens), hidden)
            logits.append(row_logits[-1])
            drafts.append(self.token(row_logits[-1]))
            tokens.append(drafts[-1])
            hidden = torch.cat([hidden, carried[-1:]])
        return drafts, torch.stack(logits)

    def draft_at_once(
        self, text: Sequence[int], states: Sequence[torch.Tensor], draft_len: int, mask_token: int
    ) -> tuple[list[int], torch.Tensor]:
        """The same by P-EAGLE: the rows after the newest one read the mask token and ``mask_hidden``, all at once."""
        masks = draft_len - 1
        chunks = self.weights["mask_hidden"].view(3, 1, -1).expand(3, masks, -1)
        hidden = torch.cat([self.fused(*states), self.fused(*chunks)])
        logits, _ = self.rows(torch.tensor([*text[1:], *[mask_token] * masks]), hidden)
        return [self.token(row) for row in logits[-draft_len:]], logits[-draft_len:]
