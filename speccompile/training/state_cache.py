"""Hidden states of training texts on the disk: the target reads each text once, not in every epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from speccompile.errors import InvalidInput, TrainingNotSaved, error_line
from speccompile.hidden_states import Record, SavedHiddenStates
from speccompile.hidden_states.records import About, encode
from speccompile.hidden_states.target_id import target_id
from speccompile.training.batches import padded, plan_batches
from speccompile.training.examples import Example, Examples
from speccompile.training.teacher import Teacher
from speccompile.utils.whole_files import write_whole

#: bfloat16 has the range of float32. In some models single values of hidden states exceed that of float16.
DTYPE = torch.bfloat16
#: Largest number of tokens and of texts of a file. With many texts, reading of the header would dominate.
FILE_TOKENS, FILE_TEXTS = 2**14, 32
_NAME = "states_{:06d}.safetensors"


def with_states(examples: Examples, teacher: Teacher, folder: Path, batch_tokens: int, *, progress: bool) -> Examples:
    """Add hidden states from ``folder`` to the examples. Missing ones are computed and written. A killed call continues
    when it is repeated; the same texts give the same files.

    Raises:
        InvalidInput: the folder has states of another target or of other layers.
        CorruptRecords: a file there is cut off or changed.
        TrainingNotSaved: the states cannot be written.
    """
    name, _, digest = target_id(teacher.target).partition(" ")
    about = About(name, digest, teacher.taps, str(DTYPE).removeprefix("torch."))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = SavedHiddenStates(folder)
        if there.about not in (None, about):
            reason = f"it has hidden states of {there.about}, and these would be of {about}"
            raise InvalidInput(name=f"the folder {folder}", reason=f"{reason}; give another folder")
        missing = [item for item in examples.items if item.name not in there]
        if missing:
            _write(missing, teacher, folder, about, batch_tokens, examples.tokens, progress)
    except OSError as error:
        raise TrainingNotSaved(folder=str(folder), reason=error_line(error)) from error
    return replace(examples, states=SavedHiddenStates(folder))


def _write(
    items: Sequence[Example],
    teacher: Teacher,
    folder: Path,
    about: About,
    batch_tokens: int,
    total: int,
    progress: bool,
) -> None:
    left = sum(map(len, items))
    number = max((int(path.stem.removeprefix("states_")) for path in folder.glob("states_*.safetensors")), default=0)
    with tqdm(
        total=total,
        initial=total - left,
        unit="tok",
        unit_scale=True,
        desc="target reads",
        disable=not progress,
        mininterval=0.5 if sys.stderr.isatty() else 30.0,
    ) as bar:
        for group in _groups(items):
            records = _records(group, teacher, batch_tokens, bar)
            number += 1
            write_whole(folder / _NAME.format(number), encode(about, records))


def _groups(items: Sequence[Example]) -> Iterator[list[Example]]:
    group: list[Example] = []
    for item in items:
        group.append(item)
        if len(group) == FILE_TEXTS or sum(map(len, group)) >= FILE_TOKENS:
            yield group
            group = []
    if group:
        yield group


def _records(group: Sequence[Example], teacher: Teacher, batch_tokens: int, bar: tqdm[None]) -> list[Record]:
    found: dict[int, Record] = {}
    for plan in plan_batches([len(item) for item in group], batch_tokens, seed=0):
        items = [group[index] for index in plan]
        states = teacher.read(padded(items)["input_ids"])
        for row, (index, item) in enumerate(zip(plan, items, strict=True)):
            size = len(item)
            found[index] = Record(
                id=item.name,
                input_ids=item.input_ids,
                loss_mask=item.loss_mask,
                hidden_state=states.final[row, :size].to(DTYPE),
                aux_hidden_state=states.tapped[row, :size].to(DTYPE),
                layers=teacher.taps,
                choices=states.choices[row, :size].int(),
            )
            bar.update(size)
    return [found[index] for index in range(len(group))]
