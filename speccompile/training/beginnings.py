"""Initial weights of heads from their target."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph_capture.model_info import decoder_layers


@torch.no_grad()
def layer_weights(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of a decoder layer, with norms converted by :func:`scale_of`."""
    found: dict[str, torch.Tensor] = dict(layer.named_parameters())
    for name, module in layer.named_modules():
        weight = found.get(f"{name}.weight")
        if weight is not None and "norm" in type(module).__name__.lower() and weight.ndim == 1:
            found[f"{name}.weight"] = scale_of(module, weight)
    return found


@torch.no_grad()
def final_scale(target: PreTrainedModel) -> torch.Tensor | None:
    """Scale of the norm after the last layer; None if it is not at Llama's module path."""
    base = target.get_submodule(decoder_layers(target)[0].rpartition(".")[0])
    norm = dict(base.named_children()).get("norm")
    weight = None if norm is None else dict(norm.named_parameters()).get("weight")
    return None if norm is None or weight is None else scale_of(norm, weight)


def scale_of(norm: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Factor that ``norm`` applies to normalised values: its ``weight``, or ``1 + weight`` (Gemma)."""
    # An input of mean 0 and mean square 1.
    ones = torch.ones_like(weight)
    ones[1::2] = -1
    scale = norm(ones) * ones
    return weight if torch.allclose(scale, weight, rtol=0.01, atol=0.01) else scale
