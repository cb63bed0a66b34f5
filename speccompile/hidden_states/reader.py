"""Records of a folder, read one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from speccompile.errors import InvalidInput
from speccompile.hidden_states.records import About, Record, read_header, read_record, read_text


class SavedHiddenStates(Mapping[str, Record]):
    """The records of a folder by id, in the order in which they were written, as far as they were when it was opened.
    Nothing but headers is read before a record is asked for.

    Args:
        folder: that records were saved to, by any number of processes.

    Raises:
        InvalidInput: there is no such folder, or its files are about different models or layers.
        CorruptRecords: a file is cut off or changed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InvalidInput(name=f"the folder {folder}", reason="there is no such folder")
        #: None while there are no records.
        self.about: About | None = None
        self._places: dict[str, tuple[Path, int]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            header = read_header(path)
            if header is None:
                continue
            about, ids = header
            if self.about not in (None, about):
                reason = f"{path.name} is about {about}, and files before it about {self.about}"
                raise InvalidInput(name=f"the folder {folder}", reason=reason)
            self.about = about
            self._places.update({id: (path, index) for index, id in enumerate(ids)})

    def __getitem__(self, id: str) -> Record:
        path, index = self._places[id]
        # Where there are records, it is known what they are about.
        assert self.about is not None
        return read_record(path, index, id, self.about.layers)

    def text(self, id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``input_ids`` and ``loss_mask`` of a record, int64 ``[n]``; its hidden states are not read."""
        return read_text(*self._places[id])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
