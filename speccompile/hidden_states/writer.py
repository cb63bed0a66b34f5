"""Writes records so that none is lost which it has told of, whenever the process is killed."""

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
    """Writes a file for every ``write_interval`` records, in a thread of its own.

    A file is written under another name, brought to the disk, and renamed: it is there as a whole or not at all. Only
    then its records count as :attr:`written`. What a killed process leaves besides is a file of the other name, which
    the next writer takes away.

    Any thread may call any method.

    Raises:
        InvalidOption: the folder cannot be written, is in use under this prefix, or has records of another kind, or
            another process writes some there.
        CorruptRecords: a file there is damaged.
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
            self._number, there = self._look_around()
        except BaseException:
            self._claim.release()
            raise
        # Replaced as a whole, and by the thread that writes alone.
        self._written = frozenset(there)
        self._next_id = _last_number(rf"{re.escape(self._prefix)}-(\d+)", there, none=-1) + 1
        # Ids of records that are there or will be, so that no two requests make the same one.
        self._taken = set(there)
        self._mutex = threading.RLock()
        self._pending: list[Record] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="speccompile-records")
        self._writing: Future[None] | None = None
        # Of writing, behind which nothing is written any more; of making one record.
        self._failure: Exception | None = None
        self._lost: Exception | None = None

    def _look_around(self) -> tuple[int, SavedHiddenStates]:
        """Number of the last file of this prefix, and all records of the folder. Takes away what was not finished."""
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

    def order(self, id: str | None = None) -> str:
        """Reserve the id of a record that will be added, or be given up; None takes the prefix and the next number,
        which no other process gives.

        Raises:
            InvalidOption: there is one of that id, or will be.
            RecordsNotWritten: an earlier one could not be made or written.
        """
        with self._mutex:
            self._raise_failure()
            while id is None:
                made, self._next_id = f"{self._prefix}-{self._next_id}", self._next_id + 1
                id = None if made in self._taken else made
            if id in self._taken:
                reason = f"there is a record of that id in {self.folder}, or one on its way"
                raise InvalidOption(where=WHERE, name="record", value=id, reason=reason)
            self._taken.add(id)
            return id

    def give_up(self, id: str) -> None:
        """No record of that id comes."""
        with self._mutex:
            self._taken.discard(id)

    def add(self, record: Record) -> None:
        """Have it written with the next file; waits while the disk is a whole file behind."""
        with self._mutex:
            self._pending.append(record)
            if len(self._pending) >= self._interval and self._failure is None:
                self._wait()
                batch, self._pending = self._pending, []
                self._writing = self._worker.submit(self._write, batch)

    def fail(self, error: Exception) -> None:
        """A record that was ordered could not be made: no other is taken any more."""
        with self._mutex:
            self._lost = self._lost or error

    def flush(self) -> None:
        """Write what waits, in a file of fewer records.

        Raises:
            RecordsNotWritten: the disk does not take it, or some record could not be made.
        """
        with self._mutex:
            self._wait()
            batch, self._pending = self._pending, []
            if batch and self._failure is None:
                # Here, since no thread takes work any more when the interpreter ends.
                try:
                    self._write(batch)
                except Exception as error:
                    self._failure = error
            self._raise_failure()

    def close(self) -> None:
        """The same, and let another process write there."""
        try:
            self.flush()
        finally:
            self._worker.shutdown()
            self._claim.release()

    def _wait(self) -> None:
        """Until the file that is being written is there."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except Exception as error:
                # Told to whoever orders the next record, whatever it is: requests that run have no part in it.
                self._failure = error

    def _raise_failure(self) -> None:
        error = self._failure or self._lost
        if error is not None:
            raise RecordsNotWritten(folder=str(self.folder), reason=error_line(error)) from error

    def _write(self, records: list[Record]) -> None:
        self._number += 1
        name = f"{self._prefix}_{self._number:06d}.safetensors"
        write_whole(self.folder / name, encode(self._about, records))
        self._written |= {record.id for record in records}


def _last_number(pattern: str, names: Iterable[str], *, none: int) -> int:
    """The greatest of what the group of ``pattern`` has in ``names``, or ``none``."""
    return max((int(found[1]) for name in names if (found := re.fullmatch(pattern, name))), default=none)
