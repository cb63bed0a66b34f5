"""Writes records so that none is lost which it has told of, whenever the process is killed."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock, Timeout

from speccompile.errors import InvalidOption, RecordsNotWritten, told
from speccompile.hidden_states.options import WHERE, SaveHiddenStates
from speccompile.hidden_states.reader import SavedHiddenStates
from speccompile.hidden_states.records import About, Record, encode


class RecordWriter:
    """Writes a file for every ``write_interval`` records, in a thread of its own.

    A file is written under another name, brought to the disk, and renamed: it is there as a whole or not at all. Only
    then its records count as :attr:`written`. What a killed process leaves besides is a file of the other name, which
    the next writer takes away.

    Any thread may call any method.

    Raises:
        InvalidOption: the folder cannot be written, is in use under this prefix, or has records of another kind.
        CorruptRecords: a file there is damaged.
    """

    def __init__(self, options: SaveHiddenStates, about: About) -> None:
        self.folder = Path(options.output_directory)
        self._prefix, self._interval = options.file_prefix, options.write_interval
        self._about = about
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / f".{self._prefix}.lock")
            self._lock.acquire(timeout=0)
            for partial in self.folder.glob(f".{self._prefix}_*.partial"):
                partial.unlink()
        except Timeout:
            reason = f"a process writes there, under file_prefix={self._prefix!r}; give another one"
            raise self._invalid(reason) from None
        except OSError as error:
            raise self._invalid(f"it cannot be written ({told(error)})") from error
        there = SavedHiddenStates(self.folder)
        if there.about not in (None, about):
            raise self._invalid(f"it has records of {there.about}, and these would be of {about}; give another folder")
        # Replaced as a whole, and by the thread that writes alone.
        self._written = frozenset(there)
        self._number = max(map(_number, self.folder.glob(f"{self._prefix}_*.safetensors")), default=0)
        self._next_id = max((int(id) for id in there if id.isdecimal()), default=-1) + 1
        # Ids of records that are there or will be, so that no two requests make the same one.
        self._taken = set(there)
        self._mutex = threading.RLock()
        self._pending: list[Record] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="speccompile-records")
        self._writing: Future[None] | None = None
        self._failure: OSError | None = None

    def _invalid(self, reason: str) -> InvalidOption:
        return InvalidOption(where=WHERE, name="output_directory", value=str(self.folder), reason=reason)

    @property
    def written(self) -> frozenset[str]:
        """Ids of the records that are on the disk, those of earlier processes included."""
        return self._written

    def order(self, id: str | None = None) -> str:
        """Reserve the id of a record that will be added, or be given up; None takes the next number.

        Raises:
            InvalidOption: there is one of that id, or will be.
            RecordsNotWritten: an earlier one could not be written.
        """
        with self._mutex:
            self._raise_failure()
            if id is None:
                id, self._next_id = str(self._next_id), self._next_id + 1
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

    def flush(self) -> None:
        """Write what waits, in a file of fewer records.

        Raises:
            RecordsNotWritten: the disk does not take it.
        """
        with self._mutex:
            self._wait()
            self._raise_failure()
            batch, self._pending = self._pending, []
            if batch:
                # Here, since no thread takes work any more when the interpreter ends.
                try:
                    self._write(batch)
                except OSError as error:
                    self._failure = error
            self._raise_failure()

    def close(self) -> None:
        """The same, and let another process write there."""
        try:
            self.flush()
        finally:
            self._worker.shutdown()
            self._lock.release()

    def _wait(self) -> None:
        """Until the file that is being written is there."""
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as error:
                self._failure = error
            self._writing = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RecordsNotWritten(folder=str(self.folder), reason=told(self._failure)) from self._failure

    def _write(self, records: list[Record]) -> None:
        self._number += 1
        name = f"{self._prefix}_{self._number:06d}.safetensors"
        partial = self.folder / f".{name}.partial"
        with partial.open("wb") as file:
            file.write(encode(self._about, records))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self.folder / name)
        _sync_folder(self.folder)
        self._written |= {record.id for record in records}


def _number(path: Path) -> int:
    found = re.search(r"_(\d+)\.safetensors$", path.name)
    return int(found[1]) if found else 0


def _sync_folder(folder: Path) -> None:
    """Bring its names to the disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
