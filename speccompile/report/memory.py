"""Memory that a wrap holds, and savings by other options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.ops.cpu.forms import FORMS
from speccompile.ops.cpu.packing import Pack, WeightPacks
from speccompile.report.memory_data import Buffer, Memory, MemoryItem, Saving
from speccompile.utils.weight_forms import WEIGHT_FORMS, WeightForms

#: Beginning of the name of an adapter's buffer.
_OF_LAYER = re.compile(r"^lora_\d+_")
#: The target's keys or values of a layer.
_KV = re.compile(r"^[kv]_\d+$")
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
    """Sum up all tensors, each once.

    Args:
        weights, drafter: of the model and of the mode's network, by path.
        ports: of the executables. Weights that are not the model's own tensors are packed copies.
    """
    seen: set[int] = set()
    items: dict[tuple[str, ...], list[int]] = {}

    def add(path: tuple[str, ...], nbytes: int) -> None:
        items.setdefault(path, []).append(nbytes)

    for group, tensors in (("model", weights), ("drafter", drafter)):
        for name, tensor in tensors.items():
            if _first(tensor, seen):
                # An expanded tensor of one element may replace a packed weight.
                add((group, *_path(name)), min(tensor.nbytes, tensor.untyped_storage().nbytes()))
    for port in ports:
        if port.value is not None and port.role == "weight" and _first(port.value, seen):
            group = "packed copies" if port.own else "constants"
            add((group, *_path(port.path or port.name)), port.value.nbytes)
    for buffer in buffers:
        add(("arena", buffer.group, *_buffer(buffer)), buffer.nbytes)
    found = tuple(MemoryItem(path, sum(sizes), len(sizes)) for path, sizes in items.items())
    # Nearly all of it is KV: integers add only a few bytes per token.
    kept = [tensor for tensor in layout.tensors.values() if tensor.follows_text]
    per_token = sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in kept)
    slots = layout.max_batch + 1
    kv = sum(tensor.nbytes for tensor in kept if _KV.match(tensor.name) and tensor.dtype is torch.float32)
    paging = layout.paging
    savings = tuple(_savings(packs, 0 if paging else per_token * slots, layout.max_len, kv))
    pages = (0, 0) if paging is None else (paging.count - 1, paging.size)
    return Memory(found, savings, per_token, slots, layout.max_len, *pages)


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


def _savings(packs: WeightPacks, bytes_per_place: int, max_len: int, float32_kv: int) -> Iterator[Saving]:
    own = {pack.weight.data_ptr(): pack for pack in packs if pack.weight is not None and not pack.format}.values()
    quantized = any(pack.format for pack in packs)
    if own and packs.freed is None and not quantized:
        yield Saving("free_originals=True", sum(map(_own_bytes, own)), "one copy of each packed weight instead of two")
    if own and packs.freed is None and not packs.rounds:
        for name in WEIGHT_FORMS:
            if FORMS[name].rounds:
                forms = WeightForms(name)
                of_tables = FORMS[forms.form((), of_vocabulary=True)]
                rounded = sum(map(_bytes_in(forms), own))
                rounded += sum(of_tables.nbytes(rows, size, 0) for rows, size in packs.tables.values())
                yield Saving(f'weights="{name}"', packs.nbytes - rounded, f"packed copies {FORMS[name].description}")
    if float32_kv:
        yield Saving('kv="float16"', float32_kv // 2, "keys and values in half of the bytes")
    shorter = max_len // 2
    if bytes_per_place and shorter > 1:
        yield Saving(f"max_len={shorter}", bytes_per_place * (max_len - shorter), "half of the places of every slot")


def _bytes_in(forms: WeightForms) -> Callable[[Pack], int]:
    """Bytes of a packed weight under another choice of forms."""

    def size(pack: Pack) -> int:
        form = FORMS[forms.form((), of_vocabulary=pack.of_vocabulary)]
        return (pack.experts or 1) * form.nbytes(pack.features, pack.depth, pack.tensors[0].itemsize)

    return size


def _own_bytes(pack: Pack) -> int:
    assert pack.weight is not None
    return pack.weight.nbytes
