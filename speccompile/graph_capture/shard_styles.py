"""The modules of a sharded model, with collectives that a graph can hold.

transformers shards a module by a style of its plan, and puts a function into the place of its forward that goes through
``DTensor``. A capture needs plain tensors and ops, so each style has a class here that computes the same on the rank's
own part of the weights: the class of the module is derived from it and from the module's own class.

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
    """A module whose own tensors are this rank's part.

    Attributes:
        shard_group, shard_ranks, shard_rank: its group, the number of ranks, and this one's.
        shard_whole: the size of the sharded dimension on all ranks together; 0 where the style does not need it.
    """

    shard_group: str
    shard_ranks: int
    shard_rank: int
    shard_whole: int = 0

    @property
    def shard_chunk(self) -> int:
        """The size of every part but the last ones, as ``torch.chunk`` cuts."""
        return -(-self.shard_whole // self.shard_ranks)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``x`` over the ranks that share the layer."""
        return collective_op("all_reduce")(x, self.shard_group, self.shard_ranks)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """Parts of the last dimension, joined."""
        missing = self.shard_chunk - x.shape[-1]
        x = F.pad(x, (0, missing)) if missing else x
        return collective_op("all_gather")(x, self.shard_whole, self.shard_group, self.shard_ranks)


def collective_op(name: str) -> Any:
    """The op of a collective, which graphs call."""
    assert name in collective.COLLECTIVES
    return getattr(torch.ops.speccompile, name).default


class RowwiseLinear(Sharded):
    """The inputs are sharded: the results are summed, and the bias is added once."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.summed(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class SplitRowwiseLinear(RowwiseLinear):
    """The same of an input that every rank has whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = self.shard_rank * self.shard_chunk
        return super().forward(x[..., start : start + self.weight.shape[-1]])


class JoinedColwise(Sharded):
    """The outputs are sharded, and joined."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.joined(super().forward(*args, **kwargs))


class HiddenEmbedding(JoinedColwise):
    """Each rank has a part of every vector."""


class Summed(Sharded):
    """The result of each rank is a part of the sum (experts, of which each rank has a slice)."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.summed(super().forward(*args, **kwargs))


class Divided(Sharded):
    """What is the same on every rank, before a sum over the ranks."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = super().forward(x / self.shard_ranks, *args, **kwargs)
        return result


class VocabularyEmbedding(Sharded):
    """Each rank has the vectors of some ids; the others are zeros, and the sum is the vector."""

    weight: torch.Tensor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids, super().forward)

    def rows(self, ids: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The vectors of ``ids``; ``look_up`` accepts ids of this rank's part."""
        own = ids - self.shard_rank * self.shard_chunk
        inside = (own >= 0) & (own < self.weight.shape[0])
        vectors = look_up(torch.where(inside, own, 0))
        return self.summed(torch.where(inside[..., None], vectors, 0.0))


#: By transformers' name of a style for a module: its class, None where the rank's own part needs nothing else.
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
    """``kind`` with the collectives of ``style``; the same class whenever it is asked for."""
    if (style, kind) not in _classes:
        _classes[style, kind] = _derived(style, kind)
    return _classes[style, kind]


def _derived(style: type[Sharded], kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"{style.__name__}Of{kind.__name__}", (style, kind), {"__module__": __name__})


def whole_weight(module: nn.Module) -> torch.Tensor:
    """The weight of a module on all ranks together: for a drafter that reads the target's embedding or lm_head as a
    tensor. All ranks have to call it."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    with torch.no_grad():
        if isinstance(module, HiddenEmbedding):
            return module.joined(weight)
        return module.joined(weight.T).T.contiguous() if _shards_rows(module) else weight  # type: ignore[operator]


def embedded_rows(module: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The rows ``ids`` of an embedding's weight, ``[*ids.shape, M]``, without what the module does to them besides (a
    scale, in Gemma). Of a shard it is a collective."""
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
    """The number of rows of a module's weight on all ranks together."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return int(module.shard_whole) if _shards_rows(module) else len(weight)  # type: ignore[arg-type]


def _shards_rows(module: nn.Module) -> bool:
    return isinstance(module, JoinedColwise | VocabularyEmbedding) and not isinstance(module, HiddenEmbedding)
