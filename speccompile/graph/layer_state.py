"""State of the target's layers, as observed in a run on a few tokens: keys and values, keys of an index, recurrent
state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from speccompile.graph.state import N, S, StateSpec, T
from speccompile.ops.kv_rows import row_size


@dataclass(frozen=True)
class KVShape:
    """Observed sizes of one layer's KV: ``key`` is (G, D), ``value`` is (G, Dv)."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype

    def stored_in(self, dtype: torch.dtype) -> KVShape:
        """The sizes and the dtype of a cache that rounds to ``dtype``."""
        key, value = ((heads, row_size(size, dtype)) for heads, size in (self.key, self.value))
        return KVShape(key, value, dtype)


def kv_state(observed: Mapping[int, KVShape]) -> list[StateSpec]:
    """Keys ``[N, S, G, D]`` and values ``[N, S, G, Dv]`` of each observed layer."""
    specs = []
    for layer, shape in observed.items():
        specs.append(StateSpec(f"k_{layer}", (N, S, *shape.key), shape.dtype, reset=False, in_pages=True))
        specs.append(StateSpec(f"v_{layer}", (N, S, *shape.value), shape.dtype, reset=False, in_pages=True))
    return specs


#: State ``[N]`` of an encoder-decoder: the positions of the encoder's output for each slot's request.
SOURCE_LENGTH = "source_length"


def cross_names(layers: Iterable[int]) -> tuple[list[str], list[str]]:
    """The names of the state tensors with the keys, and of those with the values, that layers attend to in the
    encoder's output."""
    known = list(layers)
    return [f"cross_k_{layer}" for layer in known], [f"cross_v_{layer}" for layer in known]


def cross_state(observed: Mapping[int, KVShape], positions: int) -> list[StateSpec]:
    """Keys ``[N, P, G, D]`` and values ``[N, P, G, Dv]`` of the encoder's output for each observed layer, and the
    output's length.

    Args:
        positions: P.
    """
    if not observed:
        return []
    specs = [StateSpec(SOURCE_LENGTH, (N,), torch.int64, high=positions + 1, of_inputs=True)]
    for key, value, shape in zip(*cross_names(observed), observed.values(), strict=True):
        specs.append(StateSpec(key, (N, positions, *shape.key), shape.dtype, of_inputs=True))
        specs.append(StateSpec(value, (N, positions, *shape.value), shape.dtype, of_inputs=True))
    return specs


@dataclass(frozen=True)
class IndexShape:
    """Observed size of one layer's index of keys: ``size`` numbers for each token."""

    size: int
    dtype: torch.dtype


def index_name(layer: int) -> str:
    """The name of the state tensor with a layer's index keys.

    It is not ``index_2``: nodes of ``aten.index`` have such names in a captured graph.
    """
    return f"index_key_{layer}"


def index_state(observed: Mapping[int, IndexShape]) -> list[StateSpec]:
    """The keys ``[N, S, size]`` of each layer's index."""
    return [
        StateSpec(index_name(layer), (N, S, shape.size), shape.dtype, reset=False, in_pages=True)
        for layer, shape in observed.items()
    ]


#: State ``[N]`` of a target with recurrent layers: the number of tokens of its sequence that each slot's state has
#: absorbed.
ABSORBED = "absorbed_length"


@dataclass(frozen=True)
class RecurrentShape:
    """Observed sizes of the state of one recurrence of a layer. The state is float32.

    Args:
        state: shape of a slot's state. Empty for a convolution, whose state is its newest inputs.
        inputs: F, the numbers that it reads at one position.
        window: the number of newest committed positions whose inputs it reads in every step.
        prompts_differ: tokens leave another state if they are read as a prompt than if steps read them.
    """

    state: tuple[int, ...]
    inputs: int
    window: int = 0
    prompts_differ: bool = False


def recurrent_names(observed: Mapping[str, RecurrentShape]) -> list[str]:
    """The names of the state tensors that recurrences read and write."""
    return [spec.name for spec in recurrent_state(observed)[1:]]


def recurrent_state(observed: Mapping[str, RecurrentShape]) -> list[StateSpec]:
    """The state of each recurrence, ``[N, ...]``, under its name, and the inputs of the newest positions, ``[N, R,
    F]``, under the name with ``_kept``. See :mod:`speccompile.ops.recurrence`.

    Such state has no dimension of positions.
    """
    if not observed:
        return []
    f32 = torch.float32
    specs = [StateSpec(ABSORBED, (N,), torch.int64, high=S, recurrent=True)]
    for name, shape in observed.items():
        if shape.state:
            specs.append(StateSpec(name, (N, *shape.state), f32, recurrent=True))
        specs.append(StateSpec(f"{name}_kept", (N, T + shape.window, shape.inputs), f32, recurrent=True))
    return specs


def checkpoint_state(observed: Mapping[str, RecurrentShape], count: int) -> list[StateSpec]:
    """State tensors for ``count`` copies of each slot's recurrent state: the state of each recurrence, and for a
    convolution the inputs in its window."""
    specs = []
    for spec in recurrent_state(observed)[1:] if count else []:
        name = spec.name.removesuffix("_kept")
        if spec.name == name or not observed[name].state:
            shape = (N - 1, count, *spec.shape[1:])
            specs.append(StateSpec(f"{name}_checkpoints", shape, spec.dtype, checkpoint_of=spec.name))
    return specs
