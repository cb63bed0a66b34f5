"""Writer of training texts. A killed process loses only the texts of the last seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from speccompile.errors import InvalidInput, TextsNotWritten, error_line
from speccompile.training.text_files import PATTERN, Progress, Source, TextFile, TrainingText, encode
from speccompile.utils.whole_files import partial_path, write_whole

#: Number of tokens after which another file begins.
FILE_TOKENS = 2**18


class TextWriter:
    """Appends texts to a folder. Each :meth:`save` rewrites the newest file as a whole, until it is full.

    The contents of a folder depend only on the texts, not on the times of saves. As a context manager, it locks the
    folder for this process.

    Raises:
        InvalidInput: the folder cannot be written, another process writes there, or its texts have another source.
        CorruptTexts: a file there is damaged.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder, self._source = folder, source
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise self._refused("another process writes there") from None
        except OSError as error:
            raise self._refused(f"it cannot be written ({error_line(error)})") from error
        try:
            self._open()
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        files = [TextFile(path) for path in sorted(self.folder.glob(PATTERN))]
        for file in files:
            self._check(file)
        for partial in self.folder.glob(partial_path(Path(PATTERN)).name):
            partial.unlink()
        #: Full files, and the texts of the newest file.
        full = [file for file in files if file.tokens >= FILE_TOKENS]
        self._full = len(full)
        self._newest = list(files[-1]) if len(files) > len(full) else []
        self.progress = files[-1].progress if files else Progress()
        self.tokens, self.texts = sum(file.tokens for file in files), sum(len(file) for file in files)
        self._unsaved = False

    def _check(self, file: TextFile) -> None:
        theirs, ours = file.source, self._source
        if theirs.target != ours.target:
            raise self._refused(f"its texts are by the target {theirs.target}, and this is {ours.target}")
        names = sorted({*theirs.options, *ours.options})
        if changed := [name for name in names if theirs.options.get(name) != ours.options.get(name)]:
            pairs = ", ".join(f"{name} {theirs.options.get(name)} and not {ours.options.get(name)}" for name in changed)
            raise self._refused(f"its texts were written with {pairs}")

    def _refused(self, reason: str) -> InvalidInput:
        return InvalidInput(name=f"the folder {self.folder}", reason=f"{reason}; give another folder")

    def there(self) -> Iterator[TrainingText]:
        """Texts that the folder already has."""
        for path in sorted(self.folder.glob(PATTERN)):
            yield from TextFile(path)

    def add(self, text: TrainingText | None, progress: Progress) -> None:
        """Append a text, or with None only record the progress. A full file is saved.

        Raises:
            TextsNotWritten: the folder cannot be written.
        """
        self.progress, self._unsaved = progress, True
        if text is None:
            return
        self._newest.append(text)
        self.tokens += len(text.input_ids)
        self.texts += 1
        if sum(len(text.input_ids) for text in self._newest) >= FILE_TOKENS:
            self.save()
            self._full, self._newest = self._full + 1, []

    def save(self) -> None:
        """Write the added texts.

        Raises:
            TextsNotWritten: the folder cannot be written.
        """
        if not self._unsaved:
            return
        path = self.folder / PATTERN.replace("*", f"{self._full + 1:06d}")
        try:
            write_whole(path, encode(self._source, self.progress, self._newest))
        except OSError as error:
            raise TextsNotWritten(folder=str(self.folder), reason=error_line(error)) from error
        self._unsaved = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()
