"""Export of saved hidden states to the files that SpecForge's offline training reads, one for each record.

Source: SpecForge, ``scripts/prepare_hidden_states.py`` (names of folders and files), ``OfflineCaptureLayout`` of each
algorithm's ``providers.py`` (keys), ``runtime/data_plane/offline_reader.py`` (fields that are read),
``training/assembly.py: _ensure_offline_vocab_mapping``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import torch

from speccompile.errors import InvalidInput, InvalidOption
from speccompile.hidden_states.records import Record

#: SpecForge's training algorithms, which differ in the keys that they read.
Strategy = Literal["eagle3", "dflash", "domino", "dspark"]

#: Files of a folder, as SpecForge groups them.
GROUP = 2000


def export_specforge(
    records: Mapping[str, Record], output_directory: str | Path, *, strategy: Strategy = "eagle3"
) -> list[Path]:
    """Write a file ``rows_0-2000/data_0.ckpt``, ... for each record; the folder is SpecForge's ``hidden_states_path``.

    A file is a dict that ``torch.save`` wrote: ``input_ids`` and ``loss_mask`` int64 ``[n]``, the captured layers'
    outputs ``[1, n, layers * M]`` and the final norm's ``[1, n, M]`` in the dtype they were saved in. Their names
    follow ``strategy``. The captured layers must be those that the draft model's config names. This function writes no
    vocabulary mapping. Local offline training counts the tokens of these files itself if ``model.vocab_mapping_path``
    is empty; disaggregated training needs a mapping from another source.

    Args:
        records: for example ``SavedHiddenStates(folder)``; read one at a time.
        output_directory: created if it does not exist; it must not hold feature files yet.
        strategy: ``eagle3`` writes ``aux_hidden_state`` and ``hidden_state``; ``dflash`` and ``domino`` write
            ``hidden_states``, only the captured layers; ``dspark`` also writes ``target_last_hidden_states``.

    Returns:
        The files in the order of the records. Records that SpecForge skips are skipped here, with a warning: those that
        hold NaN and, except for ``eagle3``, those without two adjacent tokens to learn from.

    Raises:
        InvalidOption: ``strategy`` is unknown.
        InvalidInput: the folder holds feature files.
        CorruptRecords: a record cannot be read.
    """
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise InvalidOption(where="export_specforge", name="strategy", value=strategy, reason=f"choose from {known}")
    folder = Path(output_directory)
    # SpecForge reads every such file below the folder.
    if there := next((path for ending in (".ckpt", ".ckpt.gz") for path in folder.rglob(f"*{ending}")), None):
        reason = f"it holds feature files ({there.relative_to(folder)}), which would be trained on as well; use another"
        raise InvalidInput(name=f"the folder {folder}", reason=reason)
    written = []
    for index, record in enumerate(records.values()):
        if problem := _problem(record, strategy):
            warnings.warn(f"record {record.id!r} is not exported: {problem}", stacklevel=2)
            continue
        first = index // GROUP * GROUP
        path = folder / f"rows_{first}-{first + GROUP}" / f"data_{index}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # An export that is killed leaves no partial file that training would read.
        partial = path.with_suffix(".partial")
        torch.save(_features(record, strategy), partial)
        os.replace(partial, path)
        written.append(path)
    return written


def _problem(record: Record, strategy: Strategy) -> str | None:
    """Return why SpecForge does not train on the record, or None if it does."""
    if record.hidden_state.isnan().any() or record.aux_hidden_state.isnan().any():
        return "its hidden states hold NaN"
    if strategy != "eagle3" and not (record.loss_mask[1:] & record.loss_mask[:-1]).any():
        return f"{strategy} needs two adjacent tokens with a loss mask of 1"
    return None


def _features(record: Record, strategy: Strategy) -> dict[str, torch.Tensor]:
    eagle3 = record.as_specforge()
    if strategy == "eagle3":
        return eagle3
    aux, final = eagle3.pop("aux_hidden_state"), eagle3.pop("hidden_state")
    last = {"target_last_hidden_states": final} if strategy == "dspark" else {}
    return {**eagle3, "hidden_states": aux, **last}
