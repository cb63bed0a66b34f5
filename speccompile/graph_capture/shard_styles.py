"""Modules of a sharded model with collectives that a graph can hold.

transformers shards a module by a style of its plan, and replaces its forward by a function that uses ``DTensor``. A
capture needs plain tensors and ops. Each style therefore has a class here that computes the same on the rank's own part
of the weights. The module gets a class that derives from it and from the module's own class.

Source: ``transformers/distributed/tensor_parallel.py`` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from speccompile.ops import collective


class Sharded(nn.Module):
    """A module whose own tensors are this rank's part of the weights.

    Attributes:
        shard_group, shard_ranks, shard_rank: its group, the number of ranks, and this rank's number.
        shard_whole: the size of the sharded dimension on all ranks together; 0 if the style does not need it.
    """

    shard_group: str
    shard_ranks: int
    shard_rank: int
    shard_whole: int = 0

    @property
    def shard_chunk(self) -> int:
        """The size of every part but the last ones, as in ``torch.chunk``."""
        return -(-self.shard_whole // self.shard_ranks)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``x`` over the ranks that share the layer."""
        return collective_op("all_reduce")(x, self.shard_group, self.shard_ranks)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Join the ranks' parts of the last dimension."""
        missing = self.shard_chunk - x.shape[-1]
        x = F.pad(x, (0, missing)) if missing else x
        return collective_op("all_gather")(x, self.shard_whole, self.shard_group, self.shard_ranks)


def collective_op(name: str) -> Any:
    """Return the op of a collective, which graphs call."""
    assert name in collective.COLLECTIVES
    return getattr(torch.ops.speccompile, name).default


class RowwiseLinear(Sharded):
    """A linear with sharded inputs. The results are summed, and the bias is added once."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.summed(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class SplitRowwiseLinear(RowwiseLinear):
    """A linear with sharded inputs whose input is complete on every rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.shard_rank * self.shard_chunk
        return super().forward(x[..., start : start + self.weight.shape[-1]])


class JoinedColwise(Sharded):
    """A module with sharded outputs, which are joined."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.joined(super().forward(*args, **kwargs))


class HiddenEmbedding(JoinedColwise):
    """An embedding of which each rank has a part of every vector."""


class Summed(Sharded):
    """A module whose result is the sum over the ranks (experts, of which each rank has a slice)."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.summed(super().forward(*args, **kwargs))


class Divided(Sharded):
    """A module with the same result on every rank, before a sum over the ranks."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = super().forward(x / self.shard_ranks, *args, **kwargs)
        return result


class VocabularyEmbedding(Sharded):
    """An embedding of which each rank has the vectors of some ids. The others are zeros, so the sum is the vector."""

    weight: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids, super().forward)

    def rows(self, ids: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the vectors of ``ids``; ``look_up`` accepts ids of this rank's part."""
        own = ids - self.shard_rank * self.shard_chunk
        inside = (own >= 0) & (own < self.weight.shape[0])
        vectors = look_up(torch.where(inside, own, 0))
        return self.summed(torch.where(inside[..., None], vectors, 0.0))


#: Classes of modules by transformers' name of a style. None means that the rank's own part needs no change.
STYLES: dict[str, type[Sharded] | None] = {
    "colwise": None,
    "colwise_gather_output": JoinedColwise,
    "colwise_rep": JoinedColwise,
    "rowwise": RowwiseLinear,
    "rowwise_rep": SplitRowwiseLinear,
    "rowwise_split_input": SplitRowwiseLinear,
    "embedding_rowwise": VocabularyEmbedding,
    "embedding_colwise": HiddenEmbedding,
    "packed_colwise": None,
    "packed_rowwise": None,
    "replicated_with_grad_allreduce": None,
    "mla_kv_a_proj": None,
    "all_reduce": Summed,
    "moe_tp_experts": Summed,
    "moe_identity_expert": Divided,
    "local_params": None,
    "replicate": None,
}


_classes: dict[tuple[type[Sharded], type[nn.Module]], type[nn.Module]] = {}


def sharded_class(style: type[Sharded], kind: type[nn.Module]) -> type[nn.Module]:
    """Return ``kind`` with the collectives of ``style``. Each pair has only one class."""
    if (style, kind) not in _classes:
        _classes[style, kind] = _derived(style, kind)
    return _classes[style, kind]


def _derived(style: type[Sharded], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{style.__name__}Of{kind.__name__}", (style, kind), {"__module__": __name__})


def whole_weight(module: nn.Module) -> torch.Tensor:
    """Return the complete weight of a module, over all ranks: for a drafter that reads the target's embedding or
    lm_head as a tensor. All ranks must call it."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    with torch.no_grad():
        if isinstance(module, HiddenEmbedding):
            return module.joined(weight)
        return module.joined(weight.T).T.contiguous() if _shards_rows(module) else weight  # type: ignore[operator]


def embedded_rows(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` of an embedding's weight, ``[*ids.shape, M]``, without other ops of the module (a scale,
    in Gemma). For a shard this is a collective."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if isinstance(module, VocabularyEmbedding):
        return module.rows(ids, lambda own: F.embedding(own, weight))
    rows = F.embedding(ids, weight)
    return module.joined(rows) if isinstance(module, HiddenEmbedding) else rows


def is_shard(model: nn.Module) -> bool:
    """Whether ``model`` is a rank's part of a sharded model."""
    return any(isinstance(module, Sharded) for module in model.modules())


def whole_rows(module: nn.Module) -> int:
    """Return the number of rows of a module's weight on all ranks together."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return int(module.shard_whole) if _shards_rows(module) else len(weight)  # type: ignore[arg-type]


def _shards_rows(module: nn.Module) -> bool:
    return isinstance(module, JoinedColwise | VocabularyEmbedding) and not isinstance(module, HiddenEmbedding)
