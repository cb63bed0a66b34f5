"""State that the target's layers were seen to keep: keys and values, the keys of an index, and recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from speccompile.graph.state import N, S, StateSpec, T


@dataclass(frozen=True)
class KVShape:
    """What one layer was seen to write: ``key`` is (G, D), ``value`` (G, Dv)."""

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype


def kv_state(observed: Mapping[int, KVShape]) -> list[StateSpec]:
    """Keys ``[N, S, G, D]`` and values ``[N, S, G, Dv]`` of each layer that keeps some."""
    specs = []
    for layer, shape in observed.items():
        specs.append(StateSpec(f"k_{layer}", (N, S, *shape.key), shape.dtype, reset=False))
        specs.append(StateSpec(f"v_{layer}", (N, S, *shape.value), shape.dtype, reset=False))
    return specs


@dataclass(frozen=True)
class IndexShape:
    """What one layer was seen to write for an index of its keys: ``size`` numbers of each token."""

    size: int
    dtype: torch.dtype


def index_name(layer: int) -> str:
    """The name of a layer's index keys. Calls of ``aten.index`` are named ``index_2`` in a captured graph, so a name of
    that form could not be given to the state of layer 2."""
    return f"index_key_{layer}"


def index_state(observed: Mapping[int, IndexShape]) -> list[StateSpec]:
    """The keys ``[N, S, size]`` of each layer's index."""
    return [
        StateSpec(index_name(layer), (N, S, shape.size), shape.dtype, reset=False) for layer, shape in observed.items()
    ]


#: State of a target with recurrent layers: how many tokens of its sequence the state of each slot has absorbed.
ABSORBED = "absorbed_length"


@dataclass(frozen=True)
class RecurrentShape:
    """What one recurrence of a layer was seen to keep, in float32.

    Args:
        state: shape of a slot's state. Empty for a convolution, whose state is its newest inputs.
        inputs: numbers that it reads of one place, F.
        window: the newest settled places whose inputs it reads in every step.
        prompts_differ: it computes the same token otherwise in a prompt than after one.
    """

    state: tuple[int, ...]
    inputs: int
    window: int = 0
    prompts_differ: bool = False


def recurrent_names(observed: Mapping[str, RecurrentShape]) -> list[str]:
    """The names of the tensors that recurrences read and write."""
    return [spec.name for spec in recurrent_state(observed)[1:]]


def recurrent_state(observed: Mapping[str, RecurrentShape]) -> list[StateSpec]:
    """The state of each recurrence, under its name, ``[N, ...]``, and the inputs of the newest places, which end in
    ``_kept``, ``[N, R, F]``: see :mod:`speccompile.ops.recurrence`.

    Such state does not follow the text by position.
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
    """Room for ``count`` copies of a slot's recurrent state: the state of each recurrence, and of a convolution the
    inputs that its window reaches back to."""
    specs = []
    for spec in recurrent_state(observed)[1:] if count else []:
        name = spec.name.removesuffix("_kept")
        if spec.name == name or not observed[name].state:
            shape = (N - 1, count, *spec.shape[1:])
            specs.append(StateSpec(f"{name}_checkpoints", shape, spec.dtype, checkpoint_of=spec.name))
    return specs
