"""All state tensors of one wrap. They are allocated once, and a fingerprint proves that no buffer moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from speccompile.errors import StateTooLarge
from speccompile.graph.layer_state import ABSORBED
from speccompile.graph.new_tensor import new_tensor
from speccompile.graph.page_tables import PageTables, stage
from speccompile.graph.state import Layout, StateTensor
from speccompile.ops.kv_rows import has_nan

#: (executable, tensor, address, shape, strides)
Fingerprint = tuple[tuple[str, str, int, tuple[int, ...], tuple[int, ...]], ...]


class Arena(Mapping[str, torch.Tensor]):
    """State tensors by name, allocated once, at the sizes of the largest tier.

    Args:
        layout: names, shapes and initial values.
        device: the model's device.

    Attributes:
        journal: the list that records each call by which the host changes state, with its arguments. None records
            nothing.

    Raises:
        StateTooLarge: the device does not have enough memory.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        # Tensors that are created in inference mode cannot be written outside of it.
        with torch.inference_mode(False):
            self._tensors = _allocated(layout, device)
            for name, tensor in layout.tensors.items():
                if tensor.initial:
                    self._tensors[name][: len(tensor.initial)] = torch.tensor(tensor.initial, dtype=tensor.dtype)
            self._tables = None if layout.paging is None else PageTables(layout, self._tensors)
        self.journal: list[tuple[str, tuple[Any, ...]]] | None = None
        self._called: dict[str, tuple[tuple[str, ...], tuple[torch.Tensor, ...]]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, name: str, index: int | slice, value: float | Sequence[float] | torch.Tensor) -> None:
        """Set the elements ``index`` of tensor ``name``. A sequence sets the first elements there.

        Writes and steps are done in the order of the calls. The host does not wait for a running step.
        """
        self._note("write", name, index, value)
        place = self._tensors[name][index]
        if isinstance(value, int | float):
            place.fill_(value)
            return
        values = torch.as_tensor(value, dtype=place.dtype)
        stage(place[: len(values)] if values.ndim else place, values)

    @contextlib.contextmanager
    def parked(self) -> Iterator[None]:
        """In this context every row and every prompt chunk belongs to the dummy slot.

        A step can then run for its effects on the machine, such as compiled code. It changes no other slot.
        """
        bound = {name: self._tensors[name].clone() for name in ("slots", "prefill_slot", "prefill_start")}
        every = slice(None)
        self.write("slots", every, self.layout.dummy_slot)
        self.write("prefill_slot", every, self.layout.dummy_slot)
        self.write("prefill_start", every, 0)
        try:
            yield
        finally:
            for name, before in bound.items():
                self.write(name, every, before)

    def reset_slot(self, slot: int) -> None:
        """Set the state of ``slot`` to its fill values, except KV and recurrent state. These are not read for a new
        owner: ``length`` and ``absorbed_length`` bound the reads."""
        self._note("reset_slot", slot)
        for name, tensor in self.layout.tensors.items():
            if tensor.reset:
                self._tensors[name][slot].fill_(tensor.fill)

    def clear_text_state(self, slot: int, start: int) -> None:
        """Set the state of ``slot`` at the positions from ``start`` on (KV) to its fill value.

        A sum with a NaN is NaN even if the NaN's weight is 0.
        """
        self._note("clear_text_state", slot, start)
        for name, tensor in self.layout.tensors.items():
            if tensor.follows_text:
                for place in self._places(tensor, slot, start, None):
                    self._tensors[name][place].fill_(tensor.fill)

    def text_state_has_nan(self, slot: int, count: int) -> bool:
        """Whether the state of ``slot`` at its first ``count`` positions (KV) has a NaN."""
        return any(
            has_nan(self._tensors[name][place])
            for name, tensor in self.layout.tensors.items()
            if tensor.follows_text
            for place in self._places(tensor, slot, 0, count)
        )

    def copy_text_state(self, source: int, target: int, count: int, shared: int = 0) -> None:
        """Copy the state of slot ``source`` at its first ``count`` positions (KV) to slot ``target``. Pages of the
        first ``shared`` positions belong to both."""
        self._note("copy_text_state", source, target, count, shared)
        for name, tensor in self.layout.tensors.items():
            if tensor.follows_text:
                own, start = self._tensors[name], shared if tensor.in_pages else 0
                read, written = (self._places(tensor, slot, start, count) for slot in (source, target))
                for place, at in zip(read, written, strict=True):
                    own[at] = own[place]

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Let ``pages`` hold the positions of ``slot``, in order. Later positions have no page. Only in a paged
        layout."""
        self._note("set_pages", slot, pages)
        assert self._tables is not None
        self._tables.set(slot, pages)

    @contextlib.contextmanager
    def all_pages_of(self, slot: int) -> Iterator[None]:
        """In this context ``slot`` has all pages of the pool, and others have none. No request may have a slot."""
        if self.layout.paging is None or self._tables is None:
            yield
            return
        for other in range(self.layout.max_batch + 1):
            self._tables.set(other, [])
        self._tables.set(slot, range(1, self.layout.paging.count)[: self.layout.paging.per_slot])
        try:
            yield
        finally:
            self._tables.begin()

    def positions(self, slot: int) -> int:
        """The number of positions of ``slot`` that the arena holds."""
        return self.layout.cache_len if self._tables is None else self._tables.positions(slot)

    def _places(self, tensor: StateTensor, slot: int, start: int, stop: int | None) -> list[tuple[int, slice]]:
        """The pieces of ``tensor`` with the positions from ``start`` to ``stop`` of ``slot``, in order."""
        if self._tables is None or not tensor.in_pages:
            return [(slot, slice(start, stop))]
        return self._tables.places(slot, start, stop)

    def absorbed_tokens(self, slot: int) -> int | None:
        """The number of tokens of its sequence that the recurrent state of ``slot`` has absorbed. None if the target
        has no recurrent state."""
        return int(self._tensors[ABSORBED][slot]) if ABSORBED in self._tensors else None

    def start_recurrent_state(self, source: int | None, target: int) -> None:
        """Start slot ``target`` with a copy of the recurrent state of slot ``source``. None starts with an empty
        state."""
        self._note("start_recurrent_state", source, target)
        for name, tensor in self.layout.tensors.items():
            if tensor.recurrent and source is not None:
                self._tensors[name][target] = self._tensors[name][source]
        if source is None and ABSORBED in self._tensors:
            self._tensors[ABSORBED][target] = 0

    def save_checkpoint(self, slot: int, index: int) -> None:
        """Copy the recurrent state of ``slot`` to its checkpoint ``index``."""
        self._note("save_checkpoint", slot, index)
        for name, copies in self.layout.checkpoints.items():
            self._tensors[copies.name][slot, index] = self._tensors[name][slot]

    def copy_checkpoint(self, source: int, target: int, index: int) -> None:
        """Copy the checkpoint ``index`` of slot ``source`` to the same checkpoint of slot ``target``."""
        self._note("copy_checkpoint", source, target, index)
        for copies in self.layout.checkpoints.values():
            self._tensors[copies.name][target, index] = self._tensors[copies.name][source, index]

    def start_at_checkpoint(self, slot: int, index: int, place: int) -> None:
        """Restore the recurrent state of ``slot`` from its checkpoint ``index``, which has absorbed ``place``
        tokens."""
        self._note("start_at_checkpoint", slot, index, place)
        for name, copies in self.layout.checkpoints.items():
            self._tensors[name][slot] = self._tensors[copies.name][slot, index]
        self._tensors[ABSORBED][slot] = place

    def _note(self, method: str, *arguments: Any) -> None:
        if self.journal is not None:
            # Copies: the next run may change a state tensor, and the caller a list.
            copies = (
                item.detach().to("cpu", copy=True) if isinstance(item, torch.Tensor) else item for item in arguments
            )
            self.journal.append((method, tuple(list(item) if isinstance(item, list) else item for item in copies)))

    def record_call(self, executable: str, names: tuple[str, ...], tensors: tuple[torch.Tensor, ...]) -> None:
        """Record the tensors of an executable's newest call: first those that the backend is bound to, later those that
        it is called with."""
        self._called[executable] = (names, tensors)

    def fingerprint(self) -> Fingerprint:
        """Name, address, shape and strides of every tensor: the arena's own, and those of each executable's newest
        call, including weights.

        Equal fingerprints mean that no buffer moved.
        """
        entries = [("arena", name, tensor) for name, tensor in self._tensors.items()]
        for executable, (names, tensors) in self._called.items():
            entries.extend((executable, name, tensor) for name, tensor in zip(names, tensors, strict=True))
        return tuple(
            (owner, name, tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
            for owner, name, tensor in sorted(entries, key=lambda entry: entry[:2])
        )


def _allocated(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    try:
        return {name: new_tensor(tensor, device) for name, tensor in layout.tensors.items()}
    except (RuntimeError, OSError, OverflowError) as error:
        sizes = {name: tensor.nbytes / 2**30 for name, tensor in layout.tensors.items()}
        largest = max(sizes, key=sizes.__getitem__)
        raise StateTooLarge(
            max_batch=layout.max_batch,
            max_len=layout.max_len,
            gibibytes=sum(sizes.values()),
            device=str(device),
            largest=largest,
            of_largest=sizes[largest],
        ) from error
