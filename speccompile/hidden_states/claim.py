"""Claims of processes on a folder of records, which holds records of one model and its layers."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from speccompile.errors import InvalidOption
from speccompile.hidden_states.options import WHERE
from speccompile.hidden_states.records import About

#: The mode of lock files: users who may write into a folder share it.
SHARED_MODE = 0o666


class Claim:
    """The right of this process to write records of ``about`` into ``folder`` under ``prefix``. It lasts until
    :meth:`release`, or until the process ends in any way.

    A file beside the lock holds ``about``, since there may be no records yet.

    Raises:
        InvalidOption: a process writes under the prefix, or records about something else under another one.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, prefix: str, about: About) -> None:
        self._folder = folder
        self._lock = _lock(folder, prefix)
        self._file = folder / f".{prefix}.about"
        # Of two processes that begin at once, the second sees the first one's claim.
        with FileLock(folder / ".lock", mode=SHARED_MODE):
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                reason = f"a process writes there, under file_prefix={prefix!r}; give another one"
                raise self._refused(reason) from None
            try:
                self._check_other_claims(repr(about))
                self._file.write_text(repr(about))
            except BaseException:
                # The traceback would keep the lock alive.
                self._lock.release()
                raise

    def release(self) -> None:
        """Let another process write there."""
        self._file.unlink(missing_ok=True)
        self._lock.release()

    def _check_other_claims(self, about: str) -> None:
        """Raises InvalidOption if another process writes records of something else into the folder."""
        for file in self._folder.glob(".*.about"):
            try:
                other = file.read_text()
            except FileNotFoundError:
                # Released just now.
                continue
            if file != self._file and other != about and self._is_held(file.name[1 : -len(".about")]):
                reason = f"a process writes records of {other} there, and these would be of {about}"
                raise self._refused(f"{reason}; give another folder")

    def _is_held(self, prefix: str) -> bool:
        """A process that was killed leaves its claim, and no lock."""
        lock = _lock(self._folder, prefix)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def _refused(self, reason: str) -> InvalidOption:
        return InvalidOption(where=WHERE, name="output_directory", value=str(self._folder), reason=reason)


def _lock(folder: Path, prefix: str) -> FileLock:
    return FileLock(folder / f".{prefix}.lock", mode=SHARED_MODE)
