"""Identifiers of targets. Training texts, hidden states and heads store the identifier of their target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from speccompile.ops.cpu.quantized import values_of
from speccompile.utils.torch_private import persistent_buffers

#: Distinguishes digests of all values from those of earlier versions, which covered the first values of each weight.
VERSION = "v2"
#: Values are summed over the rows and the columns of squares of this side.
SIDE = 1024


def target_id(model: PreTrainedModel, form: str = "same") -> str:
    """Return the class of ``model``, a digest of its weights, and ``form``: the rounded form of the weights, omitted
    if it is "same"."""
    return " ".join([type(model).__name__, weights_digest(model), *[form] * (form != "same")])


def is_id_of(noted: str, model: PreTrainedModel) -> bool:
    """Whether ``noted`` is the :func:`target_id` of ``model`` in any form, also of an earlier version."""
    name, _, rest = noted.partition(" ")
    digest = rest.partition(" ")[0]
    if name != type(model).__name__:
        return False
    new = digest.startswith(f"{VERSION}:")
    return digest == (weights_digest(model) if new else _first_values_digest(model))


@torch.no_grad()
def weights_digest(module: nn.Module) -> str:
    """Return a digest of the values of all parameters and persistent buffers.

    The digest changes with each value. It does not depend on the device or the number of threads, since the sums are of
    integers. It does not depend on the dtype either, if the same values are held in float32, bfloat16 or float16.
    Weights that ``wrap`` packed are unpacked one at a time.
    """
    digest = hashlib.sha256()
    for weight in _weights(module):
        digest.update(repr(tuple(weight.shape)).encode())
        for part in values_of(weight).reshape(-1).split(SIDE * SIDE):
            bits = _bits(part)
            square = F.pad(bits, (0, -len(bits) % SIDE)).view(-1, SIDE)
            digest.update(torch.cat([square.sum(0), square.sum(1)]).cpu().numpy().tobytes())
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Bits of each value, int64 ``[n]``. Floating-point values of at most 32 bits are converted to float32 first."""
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    return values.float().view(torch.int32).long() if values.is_floating_point() else values.long()


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield each weight once, in a fixed order."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        own = dict(module.named_parameters(recurse=False)) | persistent_buffers(module)
        if parametrize.is_parametrized(module):
            packed: Any = module.parametrizations
            own |= {name: packed[name].original for name in packed}
        for name in sorted(own):
            if id(own[name]) not in seen:
                seen.add(id(own[name]))
                yield getattr(module, name)


def _first_values_digest(model: PreTrainedModel) -> str:
    """Digest of earlier versions, over the first four values of each parameter."""
    values = [weight.detach().reshape(-1)[:4].float() for weight in model.parameters()]
    return hashlib.sha256(torch.cat(values).cpu().numpy().tobytes()).hexdigest()[:16]
