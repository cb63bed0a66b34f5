"""Mixtures of experts, captured as linears with the weights of the chosen experts.

Most families use transformers' common experts, which have an interface like attention. This package registers an
implementation (:data:`EXPERTS`). A few model files have their own loops, whose sizes come from data, or compute all
experts for every token. While a model is captured, their modules compute the same result with the package's op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.graph_capture.pointwise import sigmoid
from speccompile.utils.transformers_version import has_post_expert_norm

#: The name of the package's implementation in transformers' interface.
EXPERTS = "speccompile"

expert_linear = torch.ops.speccompile.expert_linear


def experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute a module of experts.

    Args:
        self: the module, with the attributes that transformers' ``use_experts_implementation`` declares.
        hidden_states: tokens ``[P, M]``.
        top_k_index: int64 ``[P, k]``, the chosen experts of each token.
        top_k_weights: ``[P, k]``, their weights.
    """
    names = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
    (up, up_bias), (down, down_bias) = (
        (getattr(self, name), getattr(self, f"{name}_bias") if self.has_bias else None) for name in names
    )
    inner = expert_linear(hidden_states, top_k_index, up, up_bias, self.is_transposed)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outputs = expert_linear(inner, top_k_index, down, down_bias, self.is_transposed)
    if has_post_expert_norm(self):
        outputs = self.post_expert_norm(outputs)
    return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)


@contextlib.contextmanager
def experts_chosen(model: nn.Module) -> Iterator[None]:
    """Let modules of ``model`` with transformers' common experts compute with the package's op in this context."""
    owned = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in owned if isinstance(config, PreTrainedConfig)}.values()
    before = [config._experts_implementation_internal for config in configs]
    try:
        for config in configs:
            config._experts_implementation_internal = EXPERTS
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._experts_implementation_internal = implementation


@contextlib.contextmanager
def experts_captured(model: nn.Module) -> Iterator[None]:
    """Let modules of ``model`` with their own loops compute with the package's op in this context. No other code may
    run ``model``."""
    # Contexts may be nested.
    modules = [m for m in model.modules() if _forward_of(m) is not None and "forward" not in vars(m)]
    for module in modules:
        module.forward = MethodType(_forward_of(module), module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _forward_of(module: nn.Module) -> Any:
    # The class of a module changes while a pack stands for its weight.
    kind = parametrize.type_before_parametrizations(module)
    return FORWARDS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """DBRX. The three weights are ``[E * F, M]``; the third one is applied transposed."""
    shape = -1, self.ffn_hidden_size, self.hidden_size
    gate, up, down = (weight.view(shape) for weight in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    tokens = hidden_states.reshape(-1, self.hidden_size)
    gated, inner = (expert_linear(tokens, top_k_index, weight, None, False) for weight in (gate, up))
    outputs = expert_linear(self.mlp.activation_fn(gated) * inner, top_k_index, down, None, True)
    return (outputs * top_k_weights[..., None]).sum(1).view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """LongCat. The last experts have no weights, and return their input."""
    tokens = hidden_states[:, None]
    outputs = tokens
    if self.gate_up_proj is not None:
        weight = self.gate_up_proj[: self.num_routed_experts]
        gate, up = expert_linear(hidden_states, top_k_index, weight, None, False).chunk(2, dim=-1)
        routed = expert_linear(self.act_fn(gate) * up, top_k_index, self.down_proj, None, False)
        outputs = torch.where((top_k_index < self.num_routed_experts)[..., None], routed, tokens)
    return (outputs * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _llama4(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4. Inputs are scaled by the experts' scores, which are 0 for experts that are not chosen."""
    tokens = hidden_states.reshape(-1, self.hidden_dim)
    _, logits = self.router(tokens)
    chosen_logits, chosen = logits.topk(self.top_k, dim=1)
    values = sigmoid(chosen_logits)
    of = self.experts
    gate, up = expert_linear(tokens[:, None] * values[..., None], chosen, of.gate_up_proj, None, True).chunk(2, dim=-1)
    outputs = expert_linear(up * of.act_fn(gate), chosen, of.down_proj, None, True)
    return self.shared_expert(tokens) + outputs.sum(1), logits


def _jetmoe_gating(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """JetMoe's choice of experts. Choices stay in the order of tokens, while transformers sorts them by expert. Instead
    of the number of tokens of each expert, :func:`_jetmoe_experts` receives the expert of each choice."""
    logits = self.layer(hidden_states).float()
    values, chosen = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(values, dim=1).type_as(hidden_states)
    order = torch.arange(chosen.shape[0] * self.top_k, device=chosen.device)
    return order, order // self.top_k, gates.flatten(), chosen.flatten(), logits


def _jetmoe_experts(self: Any, inputs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = expert_linear(inputs, chosen[:, None], self.weight, None, False)[:, 0]
    return outputs


#: Forwards by the name of transformers' class.
FORWARDS: dict[str, Callable[..., Any]] = {
    "DbrxExperts": _dbrx,
    "LongcatFlashExperts": _longcat,
    "Llama4TextMoe": _llama4,
    "JetMoeTopKGating": _jetmoe_gating,
    "JetMoeParallelExperts": _jetmoe_experts,
}
