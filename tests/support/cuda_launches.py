"""What a function launches on CUDA, and the bytes that its launches move: counted over meta tensors, without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from speccompile.ops.on_cuda import cuda_kernel
from speccompile.ops.triton.launch import Launch, launches_of
from speccompile.sampling.base import IMPLEMENTATIONS
from speccompile.sampling.process_scores import run_processors

ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
#: Kernels that read all logits for every row, and those that do for rows with top-k, top-p or min-p. Others read none
#: for rows without their option.
ALWAYS = {"choose_partial", "draw_partial"}
OF_FILTERS = {"find_peaks", "weigh_bands", "gather_candidates"}


class Launches(TorchDispatchMode):
    """Counts launches by name, and bytes.

    Args:
        filters: rows use top-k, top-p or min-p, and no option but these and the temperature in any case.
    """

    def __init__(self, *, filters: bool) -> None:
        super().__init__()
        self._filters = filters
        self.names: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = cuda_kernel(func)
        if func is torch.ops.speccompile.process_scores_.default:
            # It launches what the ops of its processors launch.
            with self:
                run_processors(*args)
            return None
        if kernel is not None:
            for launch in launches_of(lambda: kernel(*args, **(kwargs or {}))):
                self.names[launch.kernel.__name__] += 1
                self.bytes += self._moved(launch)
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        processor = IMPLEMENTATIONS.get(name.removeprefix("speccompile::"))
        if kernel is None and processor is not None:
            with self:
                processor.call(*args)
        elif kernel is None and not func.is_view and name not in ALLOCATIONS:
            tensors = {id(item): item for item in pytree.tree_leaves((args, kwargs, result))}
            self.names[name] += 1
            self.bytes += sum(size_of(item) for item in tensors.values() if isinstance(item, torch.Tensor))
        return result

    def _moved(self, launch: Launch) -> int:
        name, given = launch.kernel.__name__, launch.arguments
        if name in ALWAYS or (name in OF_FILTERS and self._filters):
            return size_of(given["logits"] if "logits" in given else given["scores"])
        return 0


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def launches_on_cuda(run: Callable[[], object], *, filters: bool) -> Launches:
    """Of ``run``, whose tensors are meta tensors."""
    with torch.device("meta"), torch.no_grad(), Launches(filters=filters) as counted:
        run()
    return counted
