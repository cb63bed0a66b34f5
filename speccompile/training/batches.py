"""Batches of texts of similar lengths. A batch is one item of the training loop's data."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset

from speccompile.errors import InvalidInput
from speccompile.hidden_states import Record
from speccompile.training.examples import Example, Examples

Batch = dict[str, torch.Tensor]
#: Number of batches whose texts are sorted by length together. A larger pool needs less padding, but mixes texts less.
POOL = 32


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Plan the batches: indices of their texts. A batch has as many texts as ``batch_tokens`` holds when all are padded
    to the longest one, and at least one."""
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    pools: list[list[int]] = [[]]
    filled = 0
    for index in order:
        if filled >= POOL * batch_tokens:
            pools.append([])
            filled = 0
        pools[-1].append(index)
        filled += lengths[index]
    batches: list[list[int]] = []
    for pool in pools:
        batch: list[int] = []
        # Longest first: the first text of a batch is its width.
        for index in sorted(pool, key=lambda index: -lengths[index]):
            if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(index)
        batches += [batch] if batch else []
    return batches


class Batches(Dataset[Batch]):
    """Dataset of whole batches with the same texts in every epoch. Hidden states are read on access.

    Fields: ``input_ids`` int64 ``[B, T]``, padded on the right with 0; ``loss_mask`` bool ``[B, T]``; ``texts`` int64
    ``[1]``, the number of texts. With hidden states also ``tapped`` ``[B, T, taps * M]`` and ``final`` ``[B, T, M]``,
    and ``choices`` int64 ``[B, T]`` if these are known.
    """

    def __init__(self, examples: Examples, batch_tokens: int, seed: int) -> None:
        self.examples = examples
        self.plan = plan_batches([len(item) for item in examples.items], batch_tokens, seed)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        items = [self.examples.items[place] for place in self.plan[index]]
        batch = padded(items)
        states = self.examples.states
        if states is not None:
            records = [_of_text(states[item.name], item) for item in items]
            batch["tapped"] = _stacked([record.aux_hidden_state for record in records])
            batch["final"] = _stacked([record.hidden_state for record in records])
            choices = [record.choices for record in records if record.choices is not None]
            if len(choices) == len(records):
                batch["choices"] = _stacked(choices).long()
        return batch


def padded(items: Sequence[Example]) -> Batch:
    """Batch of the texts, without hidden states."""
    return {
        "input_ids": _stacked([item.input_ids for item in items]).long(),
        "loss_mask": _stacked([item.loss_mask for item in items]),
        "texts": torch.tensor([len(items)]),
    }


def _stacked(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _of_text(record: Record, item: Example) -> Record:
    """Truncate ``record`` to the length of ``item``.

    Raises:
        InvalidInput: the record belongs to another text.
    """
    length = len(item)
    if not torch.equal(record.input_ids[:length].long(), item.input_ids.long()):
        reason = f"those of text {item.name!r} belong to another text; give another folder, or delete its states"
        raise InvalidInput(name="the saved hidden states", reason=reason)
    if len(record.input_ids) == length:
        return record
    fields = {name: getattr(record, name)[:length] for name in ("input_ids", "loss_mask", "hidden_state")}
    aux, choices = record.aux_hidden_state[:length], record.choices
    return Record(
        record.id,
        aux_hidden_state=aux,
        layers=record.layers,
        choices=None if choices is None else choices[:length],
        **fields,
    )
