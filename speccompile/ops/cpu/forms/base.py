"""The protocol of a form of packed weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from speccompile.utils.torch_private import OpOverload

#: Outputs that lie side by side in a packed weight.
COLUMNS = 32
#: Outputs that are rounded at a time: few enough that intermediate results stay in a cache.
ROWS = 512


class Form(ABC):
    """Layout of a linear's weight in memory, and the ops that read it.

    The ops accept, in this order: ``linear(x, *tensors, bias, features)``; ``linears(x, *lists of tensors, biases,
    features)`` for several weights and one ``x``; ``fused``, which is ``linears`` with further arguments after ``x``
    (:mod:`speccompile.ops.fused_linears`); ``embedding(*tensors, ids, *embedding_sizes)``; of forms that round,
    ``expert_linear(x, experts, *tensors, bias, features)``. The others are defined in :mod:`speccompile.ops.native`.
    """

    name: ClassVar[str]
    #: Names of the tensors that stand for a weight.
    tensors: ClassVar[tuple[str, ...]]
    linear: ClassVar[OpOverload]
    linears: ClassVar[OpOverload]
    fused: ClassVar[OpOverload]
    embedding: ClassVar[OpOverload]
    expert_linear: ClassVar[OpOverload]
    #: Whether the packed values differ from the weight's, and inputs are rounded too: another model.
    rounds: ClassVar[bool]
    #: Whether ``wrap(calibration=...)`` concerns it.
    calibrated: ClassVar[bool] = False
    #: The largest distance that rounding causes, as a share of the size.
    allowed: ClassVar[float]
    #: For ``explain()``, after "weights".
    description: ClassVar[str]

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that stand for ``weight``, ``[N, K]``, a float dtype."""

    def pack_for_inputs(self, weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack with errors weighted by ``importance``, float32 ``[K]``: the mean square of each input. Forms whose
        rounding has no choice ignore it (:attr:`calibrated`).
        """
        return self.pack(weight)

    @abstractmethod
    def unpack(self, packed: tuple[torch.Tensor, ...], features: int, depth: int) -> torch.Tensor:
        """The values ``[features, depth]`` that the ops multiply with; float32 where they are rounded."""

    @abstractmethod
    def distance(self, weight: torch.Tensor, values: torch.Tensor) -> tuple[float, float]:
        """The distance of ``values``, which were unpacked, from ``weight``, both ``[N, K]``, and the weight's size.

        Those of a whole weight are those of its parts, joined by :meth:`joined`.
        """

    def joined(self, one: float, other: float) -> float:
        """The distance or size of two parts: the larger one, or NaN if either is not a number."""
        return float(np.maximum(one, other))

    def holds(self, distance: float, size: float) -> bool:
        """Whether a distance from a weight of such a size is one of rounding."""
        return distance <= self.allowed * size

    @abstractmethod
    def nbytes(self, features: int, depth: int, itemsize: int) -> int:
        """Bytes of a packed weight ``[features, depth]`` whose values had ``itemsize`` bytes each."""

    def embedding_sizes(self, weight: torch.Tensor) -> tuple[int, ...]:
        """Sizes that the op ``embedding`` receives after tensors and ids."""
        return (weight.shape[1],) if self.rounds else ()


def whole_columns(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` with zeros after its outputs, up to a multiple of 32."""
    missing = -weight.shape[0] % COLUMNS
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def pack_by_rows(
    weight: torch.Tensor, pack: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
) -> tuple[torch.Tensor, ...]:
    """``pack(weight)``, whose tensors have blocks of outputs first, some rows at a time: two to seven times as fast."""
    parts = [pack(whole_columns(rows)) for rows in weight.split(ROWS)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def ceil_to(size: int, multiple: int) -> int:
    """The least multiple that is at least ``size``."""
    return -(-size // multiple) * multiple
