"""Files of what a drafter has learned from earlier requests, for later processes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from speccompile.errors import CorruptMemory, ForeignMemory
from speccompile.graph.arena import Arena
from speccompile.graph.state import DrafterMemory
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.utils.whole_files import write_whole

_VERSION = "speccompile.memory"
_DIGEST, _VOCABULARY, _CURSORS = "digest", "vocabulary", "cursors"

_writing = threading.Lock()


def write_memory(path: Path, memory: DrafterMemory, arena: Arena, loop: EngineLoop) -> None:
    """Write the tensors of ``memory`` to the file ``path``, completely or not at all. Requests may run; they wait
    for the copy.

    Raises:
        OSError: ``path`` cannot be written.
    """
    with loop.exclusive():
        tables = {name: arena[name].to("cpu", copy=True) for name in memory.tables}
    metadata = {
        _VERSION: "1",
        _VOCABULARY: str(arena.layout.vocab_size),
        _CURSORS: _cursor_sizes(memory, arena),
        _DIGEST: _digest(tables),
    }
    # Two writers of one path would share the file that is written before it is renamed.
    with _writing:
        write_whole(path, save(tables, metadata))


def read_memory(path: Path, memory: DrafterMemory, arena: Arena, loop: EngineLoop) -> None:
    """Replace the tensors of ``memory`` by those of the file ``path``. Requests may run, and draft from them.

    Raises:
        CorruptMemory: it is not a whole file that :func:`write_memory` wrote.
        ForeignMemory: it has other tensors.
        OSError: ``path`` cannot be read.
    """
    tables = _read(path, memory, arena)
    with loop.exclusive():
        for name, table in tables.items():
            arena[name].copy_(table)
        for name in memory.cursors:
            arena[name].zero_()


def _read(path: Path, memory: DrafterMemory, arena: Arena) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CorruptMemory(path=path, reason=str(error)) from error
    if metadata.get(_VERSION) != "1":
        raise CorruptMemory(path=path, reason="it has no mark of this format")
    if metadata.get(_DIGEST) != _digest(tables):
        raise CorruptMemory(path=path, reason="its contents have changed")

    def refuse(what: str, theirs: object, ours: object) -> None:
        if theirs != ours:
            raise ForeignMemory(path=path, what=what, theirs=theirs, ours=ours)

    refuse("the drafter's state", ", ".join(sorted(tables)), ", ".join(sorted(memory.tables)))
    refuse("the size of the vocabulary", int(metadata[_VOCABULARY]), arena.layout.vocab_size)
    # Tables of other depths may have equal shapes.
    refuse("the size of a row's cursors", metadata.get(_CURSORS), _cursor_sizes(memory, arena))
    for name, table in tables.items():
        refuse(f"the shape of {name}", list(table.shape), list(arena[name].shape))
        refuse(f"the dtype of {name}", table.dtype, arena[name].dtype)
    return tables


def _cursor_sizes(memory: DrafterMemory, arena: Arena) -> str:
    """The sizes of one slot's cursors. The number of slots may differ."""
    return str([list(arena[name].shape[1:]) for name in memory.cursors])


def _digest(tables: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tables):
        found.update(name.encode())
        found.update(tables[name].contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
