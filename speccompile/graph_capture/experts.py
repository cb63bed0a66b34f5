"""Expert loops whose sizes come from data, captured as products over all chosen experts at once.

Most families use transformers' common experts, which have such a form (:data:`~.attention.EXPERTS`). A few files have
loops of their own. While a model is captured, their modules compute here what they compute there: each token by the
weights of the experts that it chose, which are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def expert_loops_batched(model: nn.Module) -> Iterator[None]:
    """The expert loops of ``model``, a twin that nothing else runs, have no sizes from data inside."""
    loops = [module for module in model.modules() if _forward_of(module) is not None]
    for module in loops:
        module.forward = MethodType(_forward_of(module), module)
    try:
        yield
    finally:
        for module in loops:
            del module.forward


def _forward_of(module: nn.Module) -> Any:
    kind = type(module)
    return FORWARDS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def _products(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Of weights ``[..., O, I]`` and inputs ``[..., I]``."""
    return (weights @ inputs[..., None])[..., 0]


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Three weights ``[E * F, M]``, of which the third one is applied the other way around."""
    shape = -1, self.ffn_hidden_size, self.hidden_size
    gate, up, down = (weight.view(shape)[top_k_index] for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    tokens = hidden_states.reshape(-1, 1, self.hidden_size)
    inner = self.mlp.activation_fn(_products(gate, tokens)) * _products(up, tokens)
    outputs = _products(down.transpose(-1, -2), inner) * top_k_weights[..., None]
    return outputs.sum(1).view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The last experts have no weights: they return what they get."""
    tokens = hidden_states[:, None]
    outputs = tokens
    if self.gate_up_proj is not None:
        chosen = top_k_index.clamp(max=self.num_routed_experts - 1)
        gate, up = _products(self.gate_up_proj[chosen], tokens).chunk(2, dim=-1)
        routed = _products(self.down_proj[chosen], self.act_fn(gate) * up)
        outputs = torch.where((top_k_index < self.num_routed_experts)[..., None], routed, tokens)
    return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _jetmoe_gating(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Choices stay in the order of tokens, where transformers sorts them by expert. Instead of the number of tokens of
    each expert, :func:`_jetmoe_experts` receives the expert of each choice."""
    logits = self.layer(hidden_states).float()
    values, experts = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(values, dim=1).type_as(hidden_states)
    order = torch.arange(experts.shape[0] * self.top_k, device=experts.device)
    return order, order // self.top_k, gates.flatten(), experts.flatten(), logits


def _jetmoe_experts(self: Any, inputs: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return _products(self.weight[experts], inputs)


#: By the name of transformers' class.
FORWARDS: dict[str, Callable[..., Any]] = {
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat,
    "JetMoeTopKGating": _jetmoe_gating,
    "JetMoeParallelExperts": _jetmoe_experts,
}
