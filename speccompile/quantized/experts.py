"""Experts of a quantised checkpoint. It has a linear of each, and transformers' model one parameter of all.

Source: the mappings of transformers (``conversion_mapping.py``) for families whose experts are ``[E, N, K]``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from speccompile.quantized.checkpoint import OnLookup
from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights

#: The parameter that has a linear of each expert, and the place of the linear's outputs among those of an expert.
PARTS = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w1": ("gate_up_proj", 0),
    "w3": ("gate_up_proj", 1),
    "w2": ("down_proj", 0),
}
_LINEAR = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(PARTS)})\.weight")


def joined_experts(
    weights: QuantizedWeights, parameters: Mapping[str, torch.Size], source: TensorSource
) -> QuantizedWeights:
    """``weights`` by names of ``parameters``: linears of experts are joined to those of all experts of a layer.

    Each is read when it is looked up. Other names stay as they are.

    Raises:
        UnsupportedCheckpoint: an expert is missing. A lookup also raises the errors of :func:`joined_parts`.
    """
    linears: defaultdict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    readers = {}
    for name in weights:
        found = None if name in parameters else _LINEAR.fullmatch(name)
        # Mixtral's blocks have another name in checkpoints.
        module = "" if found is None else found[1].replace(".block_sparse_moe.", ".mlp.")
        target, part = ("", 0) if found is None else PARTS[found[3]]
        if found is not None and f"{module}.{target}" in parameters:
            linears[f"{module}.{target}"][int(found[2]), part] = name
        else:
            readers[name] = partial(weights.__getitem__, name)
    if not linears:
        return weights
    for parameter, names in linears.items():
        experts, parts = parameters[parameter][0], 1 + max(part for _, part in names)
        places = [(expert, part) for part in range(parts) for expert in range(experts)]
        if missing := [place for place in places if place not in names]:
            reason = f"a linear of expert {missing[0][0]} is missing, or is not quantised"
            raise source.of(parameter).unsupported(reason)
        ordered = [[names[expert, part] for expert in range(experts)] for part in range(parts)]
        readers[parameter] = partial(_read, weights, ordered, source.of(parameter))
    return QuantizedWeights(OnLookup(readers), weights.format, weights.others)


def _read(weights: Mapping[str, GroupedWeight], names: Sequence[Sequence[str]], source: TensorSource) -> GroupedWeight:
    parts = []
    for of_part in names:
        found = [weights[name] for name in of_part]
        _check_alike(found, source)
        parts.append(replace(found[0], **_cat(found, 0), experts=len(of_part)))
    return joined_parts(parts, source)


def joined_parts(parts: Sequence[GroupedWeight], source: TensorSource) -> GroupedWeight:
    """Experts whose outputs are those of each of ``parts``, which have the same number of experts, one after another.

    Raises:
        UnsupportedCheckpoint: the parts have different kinds of groups, or an order of inputs.
    """
    _check_alike(parts, source)
    return replace(parts[0], **_cat(parts, 1))


def _check_alike(weights: Sequence[GroupedWeight], source: TensorSource) -> None:
    if len({(weight.bits, weight.group, weight.minimums is None) for weight in weights}) > 1:
        raise source.unsupported("its experts have different bits or groups")
    if any(weight.order is not None for weight in weights):
        raise source.unsupported("its experts have an order of inputs (act-order), each another one")


def _cat(weights: Sequence[GroupedWeight], dim: int) -> dict[str, Any]:
    """The tensors of the weights, joined by expert (0), or by output of each expert (1)."""
    found = {}
    for name in ("values", "scales", "minimums"):
        tensors = [getattr(weight, name) for weight in weights]
        if tensors[0] is not None:
            matrices = [t.unflatten(0, (w.experts or 1, -1)) for t, w in zip(tensors, weights, strict=True)]
            found[name] = torch.cat(matrices, dim).flatten(0, 1)
    return found
