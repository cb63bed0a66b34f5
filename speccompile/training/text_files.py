"""Files of training texts: token ids, beginnings of answers, and the source of the texts.

A file is NumPy's ``.npz`` with LZMA compression (``numpy.load`` reads it). It has ``tokens`` uint16 ``[n]`` (int32 for
a vocabulary of more than 65536), ``starts`` int64 ``[texts + 1]``, ``answers`` int32 ``[texts]`` (within the text),
``numbers`` int64 ``[texts]`` (of the draw) and ``about``, which is JSON. Files with the same texts have the same bytes.
"""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speccompile.errors import CorruptTexts, InvalidInput, error_line

FORMAT = 1
TEXTS_SUFFIX = ".npz"
PATTERN = f"texts_*{TEXTS_SUFFIX}"


@dataclass(frozen=True)
class TrainingText:
    """One user turn and its answer, in the chat template.

    Args:
        input_ids: int64 ``[n]``.
        answer_start: index of the answer's first token.
        number: number of the draw, unique in its folder.
    """

    input_ids: torch.Tensor
    answer_start: int
    number: int

    @property
    def loss_mask(self) -> torch.Tensor:
        """Mask, int64 ``[n]``, 1 at the answer's tokens."""
        mask = torch.zeros_like(self.input_ids)
        mask[self.answer_start :] = 1
        return mask


@dataclass(frozen=True)
class Source:
    """Origin of texts, equal for all texts of a folder.

    Args:
        target: ``Speculator.target_id``.
        vocab_size: vocabulary size of the target.
        options: options of :class:`TextOptions` except the number of tokens. Files are replaced by digests.
    """

    target: str
    vocab_size: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """Progress of a folder.

    Args:
        next: number of the first draw that is not decided.
        dropped: number of dropped texts before it, by reason.
    """

    next: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


def encode(source: Source, progress: Progress, texts: Sequence[TrainingText]) -> bytes:
    """Bytes of a file."""
    lengths = [len(text.input_ids) for text in texts]
    about = {
        "format": FORMAT,
        "target": source.target,
        "vocab_size": source.vocab_size,
        "options": dict(source.options),
        "next": progress.next,
        "dropped": dict(progress.dropped),
    }
    dtype = np.uint16 if source.vocab_size <= 2**16 else np.int32
    tokens = torch.cat([text.input_ids for text in texts]) if texts else torch.empty(0, dtype=torch.int64)
    arrays = {
        "about": np.array(json.dumps(about, sort_keys=True)),
        "numbers": np.array([text.number for text in texts], dtype=np.int64),
        "answers": np.array([text.answer_start for text in texts], dtype=np.int32),
        "starts": np.cumsum([0, *lengths], dtype=np.int64),
        "tokens": tokens.numpy().astype(dtype),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        for name, values in arrays.items():
            # An explicit ZipInfo has a fixed date.
            with archive.open(_info(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, values, allow_pickle=False)
    return buffer.getvalue()


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_LZMA
    return info


@dataclass(frozen=True)
class TextFile:
    """One file, read at first access.

    Raises:
        CorruptTexts: from every member, if the file is cut off, changed or of another format.
    """

    path: Path

    def _array(self, name: str) -> np.ndarray[Any, Any]:
        try:
            with self.path.open("rb") as file, np.load(file) as arrays:
                return np.asarray(arrays[name])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, lzma.LZMAError) as error:
            raise CorruptTexts(path=str(self.path), reason=error_line(error)) from error

    @cached_property
    def _about(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(str(self._array("about")))
        if found["format"] != FORMAT:
            reason = f"its format is {found['format']}, and this version reads {FORMAT}"
            raise CorruptTexts(path=str(self.path), reason=reason)
        return found

    @property
    def source(self) -> Source:
        """Origin of the file's texts: target, vocabulary size and options."""
        return Source(self._about["target"], self._about["vocab_size"], self._about["options"])

    @property
    def progress(self) -> Progress:
        """Number of texts that were begun, and of dropped ones."""
        return Progress(self._about["next"], self._about["dropped"])

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = self._array("starts").tolist()
        return starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts in the file."""
        return self._starts[-1]

    def __iter__(self) -> Iterator[TrainingText]:
        tokens = torch.from_numpy(self._array("tokens").astype(np.int32))
        answers, numbers = self._array("answers").tolist(), self._array("numbers").tolist()
        for index, (answer, number) in enumerate(zip(answers, numbers, strict=True)):
            ids = tokens[self._starts[index] : self._starts[index + 1]]
            yield TrainingText(ids.long(), answer, number)


class SavedTexts:
    """Texts of a folder or of one file, in the order of their draws. Iteration holds the tokens of one file in memory
    at a time.

    Raises:
        InvalidInput: the folder has no texts, or its files have different targets or options.
        CorruptTexts: a file is cut off or changed.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        files = sorted(path.glob(PATTERN)) if path.is_dir() else [path] if path.is_file() else []
        if not files:
            raise InvalidInput(name=f"the path {path}", reason=f"there are no training texts ({PATTERN})")
        if files == [path] and path.suffix != TEXTS_SUFFIX:
            raise InvalidInput(name=f"the file {path}", reason=f"it is not a file of training texts ({PATTERN})")
        self.files = tuple(TextFile(file) for file in files)
        self.source = self.files[0].source
        for file in self.files:
            if file.source != self.source:
                reason = f"{file.path.name} and {self.files[0].path.name} have different targets or options"
                raise InvalidInput(name=f"the folder {path}", reason=reason)

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(file.tokens for file in self.files)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped texts, by reason."""
        return self.files[-1].progress.dropped

    def __len__(self) -> int:
        return sum(len(file) for file in self.files)

    def __iter__(self) -> Iterator[TrainingText]:
        for file in self.files:
            yield from file


def read_texts(path: str | Path) -> SavedTexts:
    """Read the training texts of a folder, or of one of its files.

    Raises:
        InvalidInput: the folder has no texts.
        CorruptTexts: a file is cut off or changed.
    """
    return SavedTexts(path)
