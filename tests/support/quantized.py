"""Weights as quantised checkpoints have them, made from a model's own by rounding to nearest; and how wraps of them
decode."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from speccompile.quantized import GroupedWeight, QuantizedWeights
from speccompile.speculator.speculator import Speculator
from support.packed_models import PROMPTS

#: The first prompt is longer, so that rows of a batch stand at different places.
TEXTS = [PROMPTS[0].tolist(), PROMPTS[1, :9].tolist(), PROMPTS[0, 5:8].tolist()]


@dataclass(frozen=True)
class Kind:
    """How a format stores a weight; ``group`` None is one scale for each output."""

    bits: int
    group: int | None
    minimums: bool = False
    order: bool = False
    #: Scales are exact in float16.
    half: bool = True


#: By a format of that kind.
KINDS = {
    "Q8_0": Kind(8, 32),
    "Q4_0": Kind(4, 32),
    "Q4_K": Kind(4, 32, minimums=True, half=False),
    "Q6_K": Kind(6, 16, half=False),
    "GPTQ": Kind(4, 128, minimums=True, order=True),
    "AWQ": Kind(4, 64, minimums=True),
    "channel": Kind(8, None, half=False),
}


def rounded(weight: torch.Tensor, kind: Kind, seed: int = 0) -> GroupedWeight:
    """``weight`` ``[N, K]``, rounded to nearest."""
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed)) if kind.order else None
    values = weight.detach().float() if order is None else weight.detach().float()[:, order]
    group = kind.group or inputs
    groups = values.unflatten(1, (-1, group))
    most = 2 ** (kind.bits - 1) - 1
    low = groups.amin(-1)
    scales = (groups.amax(-1) - low) / (2 * most + 1) if kind.minimums else groups.abs().amax(-1) / most
    scales = scales.half().float() if kind.half else scales
    if not kind.minimums:
        numbers = (groups / scales[..., None].clamp_min(1e-9)).round().clamp(-most - 1, most)
        return GroupedWeight(numbers.flatten(1).to(torch.int8), kind.bits, scales, None, group, order)
    # Four bits without a sign, more of them with one: formats store no wider numbers in a byte.
    first = 0 if kind.bits == 4 else -most - 1
    numbers = ((groups - low[..., None]) / scales[..., None].clamp_min(1e-9)).round().clamp(0, 2 * most + 1) + first
    return GroupedWeight(numbers.flatten(1).to(torch.int8), kind.bits, scales, first * scales - low, group, order)


def quantized(
    model: nn.Module, kind: Kind | str, only: Callable[[str], bool] = lambda name: True, **options: object
) -> QuantizedWeights:
    """The weights of all linears of ``model``, and of embeddings that are tied to one."""
    name, kind = (kind, KINDS[kind]) if isinstance(kind, str) else ("own", kind)
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and only(path):
            weight = module.weight.t() if isinstance(module, Conv1D) else module.weight
            found[f"{path}.weight"] = rounded(weight, kind)
    return QuantizedWeights(found, name, **options)  # type: ignore[arg-type]


def dequantize_(model: nn.Module, weights: QuantizedWeights) -> nn.Module:
    """``model`` with the values of ``weights``, in its dtype."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, weight in weights.items():
            module = modules[name.removesuffix(".weight")]
            values = weight.dequantize()
            module.weight.copy_(values.t() if isinstance(module, Conv1D) else values)  # type: ignore[operator]
    return model


def random_tiers(spec: Speculator, length: int, seed: int) -> list[list[int]]:
    """New tokens of ``TEXTS``, decoded in one batch that they join and leave, each step in a tier drawn at random."""
    draw = random.Random(seed)
    requests = []
    waiting = list(TEXTS)
    while waiting or not all(request.finished for request in requests):
        if waiting and draw.random() < 0.5:
            requests.append(spec.engine.submit(waiting.pop(0), max_new_tokens=length, eos_token_id=[]))
        spec.set_tier(draw.choice([0, 3]))
        spec.engine.step()
    return [request.result().token_ids for request in requests]
