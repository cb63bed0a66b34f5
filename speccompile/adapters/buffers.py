"""Buffers of LoRA adapters in the arena: their state tensors, and the packing of an adapter into them.

Shape letters: P adapters of the buffers, N slots, L adapted linears of a layer, K inputs and F outputs of a linear, R
the rank of the buffers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from speccompile.adapters.options import ALL_LINEAR, Adapters
from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena
from speccompile.graph.state import N, StateSpec
from speccompile.graph_capture.model_info import ModelInfo, decoder_layers
from speccompile.ops.lora import COLUMNS, NONE, RANKS, pack_down, pack_up

#: The state tensor ``[N]`` with the adapter of each slot.
OF_SLOT = "adapter"
#: The names of all other state tensors of adapters begin with this.
PREFIX = "lora_"


@dataclass(frozen=True)
class LoraPair:
    """The addition of an adapter to one linear: ``scale * (x @ a.T) @ b.T``.

    Args:
        a: ``[r, K]``, r the rank; b: ``[F, r]``.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float


#: An adapter: its pair for each adapted linear, by the path of the module.
LoraPairs = Mapping[str, LoraPair]


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear that adapters may adapt.

    Args:
        path: of the module in the model.
        layer: its decoder layer.
        name: its path in the layer, as part of a name of a state tensor.
        number: its index among the adapted linears of the layer.
        depth, features: numbers of inputs K and of outputs F.
        scope: the beginning of the names of state tensors that are not the target's.
    """

    path: str
    layer: int
    name: str
    number: int
    depth: int
    features: int
    scope: str = ""

    @property
    def a(self) -> str:
        """The name of the state tensor ``[P, K, R]`` of the first matrices."""
        return f"{PREFIX}{self.scope}{self.layer}_{self.name}_a"

    @property
    def b(self) -> str:
        """The name of the state tensor ``[P, ceil(F / 32), R, 32]`` of the second matrices."""
        return f"{PREFIX}{self.scope}{self.layer}_{self.name}_b"

    @property
    def ranks(self) -> str:
        """The name of the state tensor, int64 ``[P, L]``, with each adapter's rank in each linear of its layer; 0 for a
        linear that the adapter leaves out."""
        return f"{PREFIX}{self.scope}{self.layer}_ranks"

    @property
    def scales(self) -> str:
        """The name of the state tensor, float32 ``[P, L]``, with each adapter's scale in each linear of its layer."""
        return f"{PREFIX}{self.scope}{self.layer}_scales"


@dataclass(frozen=True)
class AdaptedVector:
    """A vector ``[F]`` of a draft head that adapters may replace: the weight of a norm, or the bias of a linear.

    Args:
        path: of the parameter in the head.
        size: F.
        linear: the path of the linear of which it is the bias; empty for the weight of a norm.
    """

    path: str
    size: int
    linear: str = ""

    @property
    def state(self) -> str:
        """The name of the state tensor ``[P, F]``: weights of norms, or what is added to the shared bias."""
        return f"{PREFIX}head_{self.path.replace('.', '_')}"


@dataclass(frozen=True)
class AdapterBuffers:
    """The buffers of ``count`` adapters.

    Args:
        max_rank: the largest rank of an adapter.
        linears: the linears that can be adapted, layer by layer.
        dtype: of the matrices.
        vectors: the vectors that can be adapted.
    """

    count: int
    max_rank: int
    linears: tuple[AdaptedLinear, ...]
    dtype: torch.dtype
    vectors: tuple[AdaptedVector, ...] = ()

    @staticmethod
    def of(model: PreTrainedModel, info: ModelInfo, options: Adapters) -> AdapterBuffers:
        """The buffers of ``options`` for ``model``.

        Raises:
            InvalidOption: the model has adapters in its layers, or no linear of a given name.
        """
        if _has_adapters(model):
            reason = (
                "the model has adapters in its layers already. Wrap the base model (peft_model.unload() returns it), "
                "and add each adapter with spec.add_adapter(name, folder)"
            )
            raise _invalid(options, reason)
        names = None if options.modules == ALL_LINEAR else tuple(options.modules)
        linears = tuple(_linears(model, names))
        for name in names or ():
            if not any(_is_called(linear.path, name) for linear in linears):
                found = sorted({linear.path.rpartition(".")[2] for linear in _linears(model, None)})
                raise _invalid(
                    options, f"no linear of a decoder layer is called {name!r}. Give some of {', '.join(found)}"
                )
        if not linears:
            raise _invalid(options, "the decoder layers have no linears")
        dtype = info.dtype if options.dtype is None else getattr(torch, options.dtype)
        return AdapterBuffers(options.count, options.max_rank, linears, dtype)

    @property
    def rank(self) -> int:
        """R, the rank of the buffers: ``max_rank``, rounded up to a multiple of ``speccompile.ops.lora.RANKS``."""
        return -(-self.max_rank // RANKS) * RANKS

    def state(self) -> list[StateSpec]:
        """The state tensors of the matrices and vectors."""
        i64, f32 = torch.int64, torch.float32
        specs = []
        of_layer: dict[tuple[str, str], int] = {}
        for linear in self.linears:
            of_layer[linear.ranks, linear.scales] = linear.number + 1
            blocks = -(-linear.features // COLUMNS)
            specs += [
                StateSpec(linear.a, (self.count, linear.depth, self.rank), self.dtype),
                StateSpec(linear.b, (self.count, blocks, self.rank, COLUMNS), self.dtype),
            ]
        for (ranks, scales), count in of_layer.items():
            specs += [
                StateSpec(ranks, (self.count, count), i64, high=self.max_rank + 1),
                StateSpec(scales, (self.count, count), f32),
            ]
        return [*specs, *(StateSpec(vector.state, (self.count, vector.size), self.dtype) for vector in self.vectors)]

    def packed(self, pairs: LoraPairs) -> dict[str, torch.Tensor]:
        """The values of an adapter for the state tensors of the linears, by name. A linear that the adapter leaves out
        has rank 0 and no matrices."""
        found: dict[str, torch.Tensor] = {}
        for linear in self.linears:
            if linear.number == 0:
                count = sum(other.layer == linear.layer for other in self.linears)
                found[linear.ranks] = torch.zeros(count, dtype=torch.int64)
                found[linear.scales] = torch.zeros(count)
            if (pair := pairs.get(linear.path)) is None:
                continue
            found[linear.a] = pack_down(pair.a.detach().to(self.dtype), self.rank)
            found[linear.b] = pack_up(pair.b.detach().to(self.dtype), self.rank)
            found[linear.ranks][linear.number].fill_(pair.a.shape[0])
            found[linear.scales][linear.number].fill_(pair.scale)
        return found

    def pairs_at(self, arena: Arena, position: int) -> dict[str, LoraPair]:
        """The adapter at ``position`` of the buffers. The matrices ``a`` are views of the buffers."""
        found = {}
        for linear in self.linears:
            rank = int(arena[linear.ranks][position, linear.number])
            if rank:
                up = arena[linear.b][position].transpose(1, 2).flatten(0, 1)
                scale = float(arena[linear.scales][position, linear.number])
                down = arena[linear.a][position, :, :rank].t()
                found[linear.path] = LoraPair(down, up[: linear.features, :rank], scale)
        return found


def slot_state(count: int) -> list[StateSpec]:
    """The state tensor with the adapter of each slot, one of ``count``."""
    return [StateSpec(OF_SLOT, (N,), torch.int64, fill=NONE, low=NONE, high=count)]


def write_adapter(arena: Arena, position: int, packed: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter, as :meth:`AdapterBuffers.packed` returned it, to ``position`` of the buffers."""
    for name, value in packed.items():
        arena[name][position].copy_(value)


def _invalid(options: Adapters, reason: str) -> InvalidOption:
    return InvalidOption(where="wrap", name="adapters", value=options, reason=reason)


def _has_adapters(model: nn.Module) -> bool:
    # Layers of peft exist only after an import of peft.
    layers = sys.modules.get("peft.tuners.tuners_utils")
    return layers is not None and any(isinstance(module, layers.BaseTunerLayer) for module in model.modules())


def _linears(model: PreTrainedModel, names: tuple[str, ...] | None) -> Iterator[AdaptedLinear]:
    prefix, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        number = 0
        for name, module in layer.named_modules():
            path = f"{prefix}.{index}.{name}"
            if not isinstance(module, nn.Linear | Conv1D):
                continue
            if names is None or any(_is_called(path, wanted) for wanted in names):
                # The weight of a Conv1D (transformers' linear of GPT-2) is [K, F]; that of a Linear is [F, K].
                depth, features = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
                yield AdaptedLinear(path, index, name.replace(".", "_"), number, depth, features)
                number += 1


def _is_called(path: str, name: str) -> bool:
    """Whether ``name`` matches the end of ``path``, by PEFT's rule for ``target_modules``."""
    return path == name or path.endswith(f".{name}")
