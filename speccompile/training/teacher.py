"""The target as a teacher: its hidden states and choices at each position of a text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from speccompile.errors import UnsupportedModel
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.training.after_lm_head import AfterLmHead, possible

#: Largest error of logits that are computed from the final hidden state, relative to the greatest logit.
TOLERANCE = 0.02
#: Number of tokens among which the choice is repeated with exact logits, if logits are rounded.
CANDIDATES = 16
#: Number of positions whose full logits are in memory at a time.
CHUNK = 2048


@dataclass(frozen=True)
class TargetStates:
    """Outputs of the target that a head learns from.

    Args:
        tapped: ``[B, T, taps * M]``, outputs of the tapped layers.
        final: ``[B, T, M]``, input of the target's lm_head.
        choices: int64 ``[B, T]``, the likeliest token after each position.
    """

    tapped: torch.Tensor
    final: torch.Tensor
    choices: torch.Tensor


class Teacher:
    """Target in eval mode. It reads texts padded on the right, since positions do not attend to later ones.

    Args:
        taps: decoder layers whose outputs are needed.
        bfloat16: whether the target's forward runs in autocast. The choice is then taken among the best tokens by
            rounded logits, with logits in the target's own precision.

    Raises:
        UnsupportedModel: the target's logits are not a linear function of the input of its lm_head, with a factor or a
            cap that its config names.

    Attributes:
        after: function that the target applies to its lm_head's output.
    """

    def __init__(self, target: PreTrainedModel, taps: Sequence[int], *, bfloat16: bool = False) -> None:
        self.target, self.taps, self._bfloat16 = target, tuple(taps), bfloat16
        lm_head: Any = target.get_output_embeddings()
        if lm_head is None:
            raise UnsupportedModel(model=type(target).__name__, reason="it has no lm_head")
        self._lm_head: nn.Module = lm_head
        self.weight: torch.Tensor = lm_head.weight.detach()
        self.bias: torch.Tensor | None = None if getattr(lm_head, "bias", None) is None else lm_head.bias.detach()
        self.after = self._after_lm_head()

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor) -> TargetStates:
        """Read ``input_ids`` int64 ``[B, T]``. The result is on their device."""
        (tapped, final), logits = self._forward(input_ids, bfloat16=self._bfloat16)
        device = input_ids.device
        choices = self._best_of(final, logits) if self._bfloat16 else logits.argmax(-1)
        return TargetStates(tapped.to(device), final.to(device), choices.to(device))

    def states(
        self,
        input_ids: torch.Tensor,
        tapped: torch.Tensor | None,
        final: torch.Tensor | None,
        choices: torch.Tensor | None,
    ) -> TargetStates:
        """Complete the states of a batch: missing ones are computed."""
        if tapped is None or final is None:
            return self.read(input_ids)
        return TargetStates(tapped, final, self.choices(final) if choices is None else choices)

    @torch.no_grad()
    def choices(self, final: torch.Tensor) -> torch.Tensor:
        """Likeliest tokens, int64 ``[...]``, for final hidden states ``[..., M]``."""
        rows = final.flatten(0, -2).to(self.weight.device, self.weight.dtype)
        # A cap can round several logits to the same value. The target chooses the first of these.
        found = [self.after(F.linear(chunk, self.weight, self.bias)).argmax(-1) for chunk in rows.split(CHUNK)]
        return torch.cat(found).view(final.shape[:-1]).to(final.device)

    def _best_of(self, final: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        """Choices ``[B, T]`` by exact logits, among the best tokens by ``rounded`` logits ``[B, T, V]``. Rounded logits
        are often equal."""
        best = rounded.topk(min(CANDIDATES, rounded.shape[-1]), dim=-1).indices
        logits = torch.einsum("btm,btcm->btc", final.to(self.weight.dtype), self.weight[best])
        if self.bias is not None:
            logits = logits + self.bias[best]
        return best.gather(-1, self.after(logits).argmax(-1, keepdim=True))[..., 0]

    @torch.no_grad()
    def probs(self, final: torch.Tensor) -> torch.Tensor:
        """Distributions, float32 ``[R, V]``, for final hidden states ``[R, M]``."""
        with torch.autocast(final.device.type, enabled=False):
            linear = F.linear(final.to(self.weight.dtype), self.weight, self.bias)
            return self.after(linear.float()).softmax(-1)

    def _forward(
        self, input_ids: torch.Tensor, *, bfloat16: bool = False
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        layers = decoder_layers(self.target)[1]
        tapped: dict[int, torch.Tensor] = {}
        final: list[torch.Tensor] = []

        def keep(layer: int) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                tapped[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        with ExitStack() as hooks, torch.autocast(self.target.device.type, torch.bfloat16, enabled=bfloat16):
            for layer in self.taps:
                hooks.callback(layers[layer].register_forward_hook(keep(layer)).remove)
            hooks.callback(self._lm_head.register_forward_pre_hook(lambda _m, inputs: final.append(inputs[0])).remove)
            result: Any = self.target(input_ids=input_ids.to(self.target.device), use_cache=False)
        return (torch.cat([tapped[layer] for layer in self.taps], dim=-1), final[0]), result.logits

    @torch.no_grad()
    def _after_lm_head(self) -> AfterLmHead:
        """Find the function that best reproduces the target's logits of a few tokens.

        Raises:
            UnsupportedModel: no function reproduces them.
        """
        vocab = self.weight.shape[0]
        (_, final), logits = self._forward(torch.arange(min(16, vocab))[None])
        linear = F.linear(final, self.weight, self.bias)
        found = list(possible(self.target.config.get_text_config(decoder=True)))
        differences = [float((after(linear) - logits).abs().max()) for after in found]
        least = min(differences)
        if not least <= TOLERANCE * float(logits.abs().max()):
            reason = (
                "its logits are not a linear of the final hidden state, nor one with a factor or a soft cap that its"
            )
            raise UnsupportedModel(
                model=type(self.target).__name__, reason=f"{reason} config names, which training does not support"
            )
        return found[differences.index(least)]
