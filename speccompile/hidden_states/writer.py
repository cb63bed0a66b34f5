"""The writer of records. A record that is reported as written survives if the process is killed at any time."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from speccompile.errors import InvalidOption, RecordsNotWritten, error_line
from speccompile.hidden_states.claim import Claim
from speccompile.hidden_states.options import WHERE, SaveHiddenStates
from speccompile.hidden_states.reader import SavedHiddenStates
from speccompile.hidden_states.records import About, Record, encode
from speccompile.utils.whole_files import write_whole


class RecordWriter:
    """Writes a file for every ``write_interval`` records, in a separate thread.

    A file is written under a temporary name, flushed to the disk, and renamed, so it is either complete or absent. From
    then on :attr:`written` has its records. A killed process may leave a file with a temporary name, which the next
    writer removes.

    Any thread may call any method.

    Raises:
        InvalidOption: the folder cannot be written, is in use under this prefix, or has records of another kind; or
            another process writes records of another kind there.
        CorruptRecords: a file of the folder is damaged.
    """

    def __init__(self, options: SaveHiddenStates, about: About) -> None:
        self.folder = Path(options.output_directory)
        self._prefix, self._interval = options.file_prefix, options.write_interval
        self._about = about
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._claim = Claim(self.folder, self._prefix, about)
        except OSError as error:
            raise self._invalid(f"it cannot be written ({error_line(error)})") from error
        try:
            self._number, there = self._scan_folder()
        except BaseException:
            self._claim.release()
            raise
        # Only the writing thread replaces this set, as a whole.
        self._written = frozenset(there)
        self._next_id = _last_number(rf"{re.escape(self._prefix)}-(\d+)", there, none=-1) + 1
        # Ids of records that exist or will exist, so no two requests use the same one.
        self._reserved = set(there)
        self._mutex = threading.RLock()
        self._pending: list[Record] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="speccompile-records")
        self._writing: Future[None] | None = None
        # The error of a write, after which no further file is written; the error of creating a record.
        self._failure: Exception | None = None
        self._record_failure: Exception | None = None

    def _scan_folder(self) -> tuple[int, SavedHiddenStates]:
        """Return the number of the last file of this prefix, and all records of the folder. Remove unfinished files."""
        name = rf"{re.escape(self._prefix)}_(\d+)\.safetensors"
        try:
            names = os.listdir(self.folder)
            for found in names:
                if re.fullmatch(rf"\.{name}\.partial", found):
                    (self.folder / found).unlink()
        except OSError as error:
            raise self._invalid(f"it cannot be written ({error_line(error)})") from error
        there = SavedHiddenStates(self.folder)
        if there.about not in (None, self._about):
            reason = f"it has records of {there.about}, and these would be of {self._about}; give another folder"
            raise self._invalid(reason)
        return _last_number(name, names, none=0), there

    def _invalid(self, reason: str) -> InvalidOption:
        return InvalidOption(where=WHERE, name="output_directory", value=str(self.folder), reason=reason)

    @property
    def written(self) -> frozenset[str]:
        """Ids of the records that are on the disk, those of earlier processes included."""
        return self._written

    def reserve(self, id: str | None = None) -> str:
        """Reserve the id of a record that will be added or cancelled. None chooses the prefix and the next number,
        which no other process uses.

        Raises:
            InvalidOption: a record with that id exists or is reserved.
            RecordsNotWritten: an earlier record could not be created or written.
        """
        with self._mutex:
            self._raise_failure()
            while id is None:
                own, self._next_id = f"{self._prefix}-{self._next_id}", self._next_id + 1
                id = None if own in self._reserved else own
            if id in self._reserved:
                reason = f"a record with that id is in {self.folder}, or will be written; give another id"
                raise InvalidOption(where=WHERE, name="record", value=id, reason=reason)
            self._reserved.add(id)
            return id

    def cancel(self, id: str) -> None:
        """Free a reserved id that gets no record."""
        with self._mutex:
            self._reserved.discard(id)

    def add(self, record: Record) -> None:
        """Write the record with the next file. Wait while an earlier file is being written."""
        with self._mutex:
            self._pending.append(record)
            if len(self._pending) >= self._interval and self._failure is None:
                self._wait()
                batch, self._pending = self._pending, []
                self._writing = self._worker.submit(self._write, batch)

    def fail(self, error: Exception) -> None:
        """Note that a reserved record could not be created: :meth:`reserve` and :meth:`flush` raise from now on."""
        with self._mutex:
            self._record_failure = self._record_failure or error

    def flush(self) -> None:
        """Write the pending records to a file, which may have fewer than ``write_interval``.

        Raises:
            RecordsNotWritten: the file cannot be written, or some record could not be created.
        """
        with self._mutex:
            self._wait()
            batch, self._pending = self._pending, []
            if batch and self._failure is None:
                # Written by this thread, since executors accept no work when the interpreter ends.
                try:
                    self._write(batch)
                except Exception as error:
                    self._failure = error
            self._raise_failure()

    def close(self) -> None:
        """Flush, and release the folder to other processes."""
        try:
            self.flush()
        finally:
            self._worker.shutdown()
            self._claim.release()

    def _wait(self) -> None:
        """Wait for the file that is being written."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except Exception as error:
                # The next reservation raises this error: running requests did not cause it.
                self._failure = error

    def _raise_failure(self) -> None:
        error = self._failure or self._record_failure
        if error is not None:
            raise RecordsNotWritten(folder=str(self.folder), reason=error_line(error)) from error

    def _write(self, records: list[Record]) -> None:
        self._number += 1
        name = f"{self._prefix}_{self._number:06d}.safetensors"
        write_whole(self.folder / name, encode(self._about, records))
        self._written |= {record.id for record in records}


def _last_number(pattern: str, names: Iterable[str], *, none: int) -> int:
    """Return the greatest number that the group of ``pattern`` matches in ``names``, or ``none``."""
    return max((int(found[1]) for name in names if (found := re.fullmatch(pattern, name))), default=none)
