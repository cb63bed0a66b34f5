"""What a wrap holds in memory, and what other options would save."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.ops.cpu.packing import COLUMNS, GROUP, WeightPacks
from speccompile.report.data import Buffer, Memory, MemoryItem, Saving

#: What the name of an adapter's buffer begins with.
_OF_LAYER = re.compile(r"^lora_\d+_")
#: A name with the number of a layer in it.
_NUMBERED = re.compile(r"^(?P<list>.*?)\.\d+\.(?P<rest>.*)$")


def memory_of(
    weights: Mapping[str, torch.Tensor],
    drafter: Mapping[str, torch.Tensor],
    ports: Iterable[Port],
    buffers: Iterable[Buffer],
    layout: Layout,
    packs: WeightPacks,
) -> Memory:
    """Every tensor once.

    Args:
        weights, drafter: of the model and of the mode's network, by path.
        ports: of the executables: packed copies are those of its weights that are not the model's own tensors.
    """
    seen: set[int] = set()
    items: dict[tuple[str, ...], list[int]] = {}

    def add(path: tuple[str, ...], nbytes: int) -> None:
        items.setdefault(path, []).append(nbytes)

    for group, tensors in (("model", weights), ("drafter", drafter)):
        for name, tensor in tensors.items():
            if _first(tensor, seen):
                add((group, *_path(name)), tensor.nbytes)
    for port in ports:
        if port.value is not None and port.role == "weight" and _first(port.value, seen):
            group = "packed copies" if port.own else "constants"
            add((group, *_path(port.path or port.name)), port.value.nbytes)
    for buffer in buffers:
        add(("arena", buffer.group, *_buffer(buffer)), buffer.nbytes)
    found = tuple(MemoryItem(path, sum(sizes), len(sizes)) for path, sizes in items.items())
    # Of integers only a few bytes a token; numbers are KV.
    kept = [tensor for tensor in layout.tensors.values() if tensor.follows_text]
    per_token = sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in kept)
    slots = layout.max_batch + 1
    savings = tuple(_savings(packs, per_token * slots, layout.max_len))
    return Memory(found, savings, per_token, slots, layout.max_len)


def _first(tensor: torch.Tensor, seen: set[int]) -> bool:
    known = tensor.data_ptr() in seen
    seen.add(tensor.data_ptr())
    return not known


def _path(name: str) -> tuple[str, ...]:
    match = _NUMBERED.match(name)
    name = name.removesuffix(".weight")
    if match is None:
        return (name.rpartition(".")[2],)
    return (match["list"].rpartition(".")[2], match["rest"].removesuffix(".weight"))


def _buffer(buffer: Buffer) -> tuple[str, ...]:
    if buffer.group in ("KV", "recurrent state"):
        return ({"k": "keys", "v": "values"}.get(buffer.name.split("_")[0], buffer.name),)
    if buffer.group == "adapters":
        return (_OF_LAYER.sub("", buffer.name),)
    return (buffer.name,)


def _savings(packs: WeightPacks, bytes_per_place: int, max_len: int) -> Iterator[Saving]:
    weights = {weight.data_ptr(): weight for weight in packs.weights.values()}.values()
    if weights and packs.form == "same" and packs.consumed is None:
        own = sum(weight.nbytes for weight in weights)
        yield Saving("consume=True", own, "one copy of each packed weight instead of two")
        rounded = sum(_int8_bytes(weight) for weight in weights)
        reason = "packed copies of one byte a number and a scale for each 64; this rounds the weights"
        yield Saving('weights="int8"', packs.nbytes - rounded, reason)
    shorter = max_len // 2
    if bytes_per_place and shorter > 1:
        yield Saving(f"max_len={shorter}", bytes_per_place * (max_len - shorter), "half of the places of every slot")


def _int8_bytes(weight: torch.Tensor) -> int:
    """Of :func:`speccompile.ops.cpu.packing.pack_int8`."""
    features = math.ceil(weight.shape[0] / COLUMNS) * COLUMNS
    groups = math.ceil(weight.shape[1] / GROUP)
    return features * groups * (GROUP + 4)
