"""Experts of a quantised checkpoint. It has a linear of each, and transformers' model one parameter of all.

Source: the mappings of transformers (``conversion_mapping.py``) for families whose experts are ``[E, N, K]``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

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
        UnsupportedCheckpoint: an expert is missing. A lookup also raises it if experts have different kinds of groups.
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
        places = [(expert, part) for expert in range(experts) for part in range(parts)]
        if missing := [place for place in places if place not in names]:
            reason = f"a linear of expert {missing[0][0]} is missing, or is not quantised"
            raise source.of(parameter).unsupported(reason)
        ordered = [names[place] for place in places]
        readers[parameter] = partial(_joined, weights, ordered, experts, source.of(parameter))
    return QuantizedWeights(OnLookup(readers), weights.format, weights.others)


def _joined(
    weights: Mapping[str, GroupedWeight], names: Sequence[str], experts: int, source: TensorSource
) -> GroupedWeight:
    """The weights ``names`` after one another, as ``experts`` matrices."""
    found = [weights[name] for name in names]
    first = found[0]
    for weight in found:
        if (weight.bits, weight.group, weight.minimums is None) != (first.bits, first.group, first.minimums is None):
            raise source.unsupported("its experts have different bits or groups")
        if weight.order is not None:
            raise source.unsupported("its experts have an order of inputs (act-order), each another one")
    return GroupedWeight(
        values=torch.cat([weight.values for weight in found]),
        bits=first.bits,
        scales=torch.cat([weight.scales for weight in found]),
        minimums=None if first.minimums is None else torch.cat([w.minimums for w in found if w.minimums is not None]),
        group=first.group,
        experts=experts,
    )
