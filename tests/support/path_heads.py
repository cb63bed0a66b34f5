"""MLP speculators and Hydra heads written down once more from the papers, one row and one path at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Weights = dict[str, torch.Tensor]
#: (hidden state [M], tokens of the path) -> logits of the next token, [V].
Logits = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]


def mlp_speculator(weights: Weights, count: int, *, tied: bool, scaled: bool) -> Logits:
    """``s_k = gelu(norm(W_k s_(k-1) + c E_k[x_k]))``, from ``s_0`` the hidden state; logits ``H_k s_k``. The names
    are those of IBM's files, without ``speculator.``"""

    def of(part: str, stage: int, last: str) -> torch.Tensor:
        first = 1 if part == "proj" else 0
        return weights[f"{part}.{min(stage, first) if tied else stage}.{last}"].double()

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        state = rms(hidden.double()) / 2**0.5 if scaled else hidden.double()
        decay = 0.5 ** (0.5 / count)
        for stage, token in enumerate(path):
            embedded = of("emb", stage, "weight")[token]
            weight = math.sqrt((1 - decay**2) * (len(embedded) / 2))
            state = of("proj", stage, "weight") @ state + embedded * (weight / decay)
            state = of("ln", stage, "weight") * rms(state) + of("ln", stage, "bias")
            state = 0.5 * state * (1 + torch.erf(state / 2**0.5))
        return of("head", len(path) - 1, "weight") @ state

    return logits


def hydra(weights: Weights, blocks: int, embedding: torch.Tensor, *, grounded: bool) -> Logits:
    """Head k over the hidden state and the embeddings of k + 1 tokens. Names are those of ``hydra_lm_head.pt``."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        out = weights[f"{name}.weight"].double() @ x
        return out + weights[f"{name}.bias"].double() if f"{name}.bias" in weights else out

    def logits(hidden: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        head = len(path) - 1
        x = hidden.double()
        if grounded:
            x = torch.cat([x, *[embedding[token].double() for token in path]])
        for block in range(blocks):
            name = f"hydra_mlp.{head}.{block}"
            inner = linear(f"{name}.linear", x)
            residual = linear(f"{name}.res_connection", x) if block == 0 and grounded else x
            x = residual + inner * inner.sigmoid()
        return linear(f"hydra_lm_head.{head}", x)

    return logits


def chain_of(logits: Logits, hidden: torch.Tensor, newest: int, draft_len: int) -> list[int]:
    """The likeliest chain after the ``newest`` token."""
    path = [newest]
    for _ in range(draft_len):
        path.append(int(logits(hidden, path).argmax()))
    return path[1:]
