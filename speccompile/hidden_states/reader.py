"""Records of a folder, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from speccompile.errors import InvalidInput
from speccompile.hidden_states.records import About, Record, read_header, read_record, read_text


class SavedHiddenStates(Mapping[str, Record]):
    """The records of a folder by id, in the order in which they were written.

    The mapping has the records that were complete when it was opened. It reads only headers until a record is
    requested.

    Args:
        folder: a folder of records, written by any number of processes.

    Raises:
        InvalidInput: the folder does not exist, or its files are of different models or layers.
        CorruptRecords: a file is truncated or changed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InvalidInput(name=f"the folder {folder}", reason="it does not exist")
        #: None while there are no records.
        self.about: About | None = None
        self._locations: dict[str, tuple[Path, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            header = read_header(path)
            if header is None:
                continue
            about, ids = header
            if self.about not in (None, about):
                reason = f"{path.name} is about {about}, and files before it about {self.about}"
                raise InvalidInput(name=f"the folder {folder}", reason=reason)
            self.about = about
            self._locations.update({id: (path, index) for index, id in enumerate(ids)})

    def __getitem__(self, id: str) -> Record:
        path, index = self._locations[id]
        # ``about`` is set as soon as there are records.
        assert self.about is not None
        return read_record(path, index, id, self.about.layers)

    def text(self, id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` and ``loss_mask`` of a record, int64 ``[n]``, without its hidden states."""
        return read_text(*self._locations[id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)
