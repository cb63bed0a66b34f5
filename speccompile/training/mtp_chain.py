"""An MTP module in the form of unrolled training: a chain of draft steps, each of which reads the last one's
outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

from speccompile.errors import InvalidHead, error_line
from speccompile.graph_capture.masks import Mask
from speccompile.heads import MtpHead
from speccompile.modes.network.draft_head import RowAttention
from speccompile.training.unrolled_attention import UnrolledAttention
from speccompile.utils.transformers_version import CACHE

#: Name in transformers' attention interface.
IMPLEMENTATION = "speccompile_training"
SOURCE = "of MTP modules"


@dataclass(frozen=True)
class _Attention:
    """Wrapper of the cache that replaces the mask, since decoder layers pass the mask on unchanged."""

    rows: RowAttention


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if softcap is not None or s_aux is not None:
        what = "a soft cap on scores" if s_aux is None else "sinks"
        raise InvalidHead(source=SOURCE, reason=f"the target's layers attend with {what}, which training lacks")
    assert isinstance(attention_mask, _Attention)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    # [B, heads, T, D] to [B, T, heads, D].
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return attention_mask.rows.attend(cast(int, module.layer_idx), query, key, value, scale), None


AttentionInterface.register(IMPLEMENTATION, _attend)


class _Counting(UnrolledAttention):
    """Attention that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return super().attend(*args, **kwargs)


class MtpChain(nn.Module):
    """First module of ``head`` as a :class:`~speccompile.training.unrolled.ChainHead`. Its parameters are the module's
    own. Modules that it shares with the target are not submodules, and receive no gradients.

    Raises:
        InvalidHead: training does not support the module's attention.
    """

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        if head.masks[0] != Mask():
            reason = "a layer of the target's class attends within a window, which training does not support"
            raise InvalidHead(source=SOURCE, reason=reason)
        self.module: nn.Module = head.layers[0]
        self.norm: nn.Module = head.norms[0]
        self._shared = (head,)
        head.config._attn_implementation_internal = IMPLEMENTATION
        # Run experts one by one: the form for capture gathers the weights of every token.
        head.config._experts_implementation_internal = "eager"

    @property
    def _head(self) -> MtpHead:
        return self._shared[0]

    @property
    def _dtype(self) -> torch.dtype:
        return cast(nn.Linear, self.module.eh_proj).weight.dtype

    def check(self) -> None:
        """Run two draft steps of two tokens.

        Raises:
            InvalidHead: they fail. The error has the reason.
        """
        device = cast(nn.Linear, self.module.eh_proj).weight.device
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
        hidden = torch.ones((1, 2, self._head.hidden_size), dtype=self._dtype, device=device)
        attention = _Counting()
        try:
            with torch.no_grad():
                hidden = self.fuse(hidden)
                for step in range(2):
                    hidden = self.carry(self.read(tokens, tokens + step, hidden, attention))
        except InvalidHead:
            raise
        except Exception as error:
            reason = f"a layer of the target's class does not run in training: {error_line(error)}"
            raise InvalidHead(source=SOURCE, reason=reason) from error
        if attention.calls != 2:
            reason = "a layer of the target's class does not attend through transformers' attention interface"
            raise InvalidHead(source=SOURCE, reason=f"{reason}, which training needs")

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self._head.variant.normed_target:
            return hidden_states
        with torch.no_grad():
            normed: torch.Tensor = self._head.final_norm(hidden_states)
        return normed

    def read(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor, cache: RowAttention
    ) -> torch.Tensor:
        head, positions = self._head, position_ids + 1
        with torch.no_grad():
            embedded = head.embed_tokens(input_ids).to(self._dtype)
            rotary = head.rotary_emb(embedded, positions, **head.rotary_options[0])
        out: torch.Tensor = self.module(
            embedded,
            hidden.to(self._dtype),
            attention_mask=_Attention(cache),
            position_ids=positions,
            position_embeddings=rotary,
            **{CACHE: None},
        )
        return out

    def carry(self, hidden: torch.Tensor) -> torch.Tensor:
        carried: torch.Tensor = self.norm(hidden) if self._head.variant.normed_carry else hidden
        return carried

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., V]`` of the target's lm_head, in its dtype."""
        lm_head: Any = self._head.lm_head
        normed, bias = self.norm(hidden), getattr(lm_head, "bias", None)
        weight = lm_head.weight.detach()
        return F.linear(normed.to(weight.dtype), weight, None if bias is None else bias.detach())
