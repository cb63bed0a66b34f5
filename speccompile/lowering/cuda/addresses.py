"""Which addresses a captured step may hold: those of weights, arena and pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from speccompile.errors import CapturedElsewhere, StaleGraph
from speccompile.graph.port import Port
from speccompile.lowering.tier import Tier
from speccompile.utils.torch_private import TorchDispatchMode, pytree

#: Where a tensor lies: address, shape, strides.
TensorAddress = tuple[int, tuple[int, ...], tuple[int, ...]]


def address_of(tensor: torch.Tensor) -> TensorAddress:
    """Address, shape and strides, which a CUDA graph has recorded."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def check_addresses(tier: Tier, captured: Sequence[TensorAddress], weights: Mapping[str, torch.Tensor]) -> None:
    """Compare where the tier's tensors are now with where they were when it was captured.

    Looked up anew: in the arena, and in ``weights``, the model's by path. The tier's own are what was captured.

    Raises:
        StaleGraph: names the first one that moved.
    """
    for port, bound, before in zip(tier.ports, tier.arguments, captured, strict=True):
        if port.role == "state":
            tensor = tier.arena[port.name]
        elif port.parts:
            _check_parts(tier, port, before[0], weights)
            continue
        elif port.path is not None and not port.own:
            tensor = weights.get(port.path, bound.new_empty(0))
        else:
            tensor = bound
        if address_of(tensor) != before:
            raise _stale(tier, port, port.path or port.name, before[0], tensor)


def _check_parts(tier: Tier, port: Port, begin: int, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises StaleGraph: a part of a joined weight lies elsewhere than after the parts before it."""
    for path in port.parts:
        part = weights.get(path, torch.empty(0))
        if part.data_ptr() != begin or not part.is_contiguous():
            raise _stale(tier, port, path, begin, part)
        begin += part.nbytes


def _stale(tier: Tier, port: Port, name: str, before: int, tensor: torch.Tensor) -> StaleGraph:
    then, now = hex(before), hex(tensor.data_ptr())
    return StaleGraph(tier=tier.name, role=port.role, name=name, then=then, now=now)


class Reads(TorchDispatchMode):
    """Notes, while it is on, the first op that is called with each storage on a kind of device, ops inside of compiled
    bodies included.

    Kernels that are launched past torch's dispatcher, as Inductor's own are, are not seen; what they are called with
    are tensors of the step, or allocated beside them. For that reason torch 2.13's ``check_input_liveness`` is not
    used: a tensor that Inductor's code allocates comes past the dispatcher too, so it would be taken for an input, and
    its end for a fault.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.found: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_iter((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.device.type == self._device_type and value.numel():
                self.found.setdefault(value.untyped_storage().data_ptr(), str(func))
        return func(*args, **(kwargs or {}))


def check_reads(tier: Tier, reads: Reads, pool: Sequence[range]) -> None:
    """Raises CapturedElsewhere: something was read that is neither a weight, nor in the arena, nor in the pool."""
    known = {tensor.untyped_storage().data_ptr() for tensor in tier.arguments}
    for address, op in reads.found.items():
        if address not in known and not any(address in memory for memory in pool):
            raise CapturedElsewhere(tier=tier.name, op=op, address=hex(address))
