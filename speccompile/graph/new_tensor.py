"""Memory of state tensors."""

from __future__ import annotations

import mmap

import torch

from speccompile.graph.state import StateTensor
from speccompile.utils.devices import traits_of

#: Smaller tensors are not worth a mapping.
_LARGE = 2**20


def new_tensor(tensor: StateTensor, device: torch.device) -> torch.Tensor:
    """A tensor with the fill value of ``tensor``.

    Large tensors of zeros in the host's memory are mappings: the system provides a page of memory when a step first
    writes there. Positions that no sequence has used need none.

    Raises:
        RuntimeError, OSError, OverflowError: there is not enough memory.
    """
    if traits_of(device).host_memory and tensor.nbytes >= _LARGE and not tensor.fill:
        memory = mmap.mmap(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return torch.full(tensor.shape, tensor.fill, dtype=tensor.dtype, device=device)
