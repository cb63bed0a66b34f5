"""Check of the addresses that a captured step holds: they must be those of weights, arena or pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from speccompile.errors import CapturedElsewhere, StaleGraph
from speccompile.graph.port import Port
from speccompile.lowering.tier import Tier
from speccompile.utils.torch_private import TorchDispatchMode, pytree

#: Location of a tensor: address, shape, strides.
TensorAddress = tuple[int, tuple[int, ...], tuple[int, ...]]


def address_of(tensor: torch.Tensor) -> TensorAddress:
    """Return the address, shape and strides, which a CUDA graph records."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def check_addresses(tier: Tier, captured: Sequence[TensorAddress], weights: Mapping[str, torch.Tensor]) -> None:
    """Compare the current addresses of the tier's tensors with those at the time of the capture.

    The tensors are looked up again, in the arena and in ``weights`` (the model's weights by path). Tensors that the
    tier itself owns cannot move.

    Raises:
        StaleGraph: a tensor has another address; the error names the first one.
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
    """Check that the parts of a joined weight still follow one another in memory.

    Raises:
        StaleGraph: a part is at another address.
    """
    for path in port.parts:
        part = weights.get(path, torch.empty(0))
        if part.data_ptr() != begin or not part.is_contiguous():
            raise _stale(tier, port, path, begin, part)
        begin += part.nbytes


def _stale(tier: Tier, port: Port, name: str, before: int, tensor: torch.Tensor) -> StaleGraph:
    then, now = hex(before), hex(tensor.data_ptr())
    return StaleGraph(tier=tier.name, role=port.role, name=name, then=then, now=now)


class StorageReads(TorchDispatchMode):
    """Records the first op that is called with each storage on a kind of device, also inside of compiled bodies.

    It does not see kernels that are launched without torch's dispatcher, such as Inductor's own. Their arguments are
    tensors of the step, or are allocated beside them. For that reason torch 2.13's ``check_input_liveness`` is not
    used: it does not see the allocation of a tensor by Inductor's code either, so it would report
    the tensor as an input, and the tensor's release as an error.
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


def check_reads(tier: Tier, reads: StorageReads, pool: Sequence[range]) -> None:
    """Check that the step only reads weights, the arena and the pool.

    Raises:
        CapturedElsewhere: it reads another tensor.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in tier.arguments}
    for address, op in reads.found.items():
        if address not in known and not any(address in memory for memory in pool):
            raise CapturedElsewhere(tier=tier.name, op=op, address=hex(address))
