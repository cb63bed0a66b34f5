"""Claims of processes on a folder of records, which holds records of one model and its layers."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from speccompile.errors import InvalidOption
from speccompile.hidden_states.options import WHERE
from speccompile.hidden_states.records import About

#: The mode of lock files: all users who may write to a folder share them.
SHARED_MODE = 0o666


class Claim:
    """The right of this process to write records of ``about`` to ``folder`` under ``prefix``.

    The claim lasts until :meth:`release`, or until the process ends in any way. A file beside the lock holds
    ``about``, since there may be no records yet.

    Raises:
        InvalidOption: a process writes under the same prefix, or writes records of something else under another one.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, prefix: str, about: About) -> None:
        self._folder = folder
        self._lock = _lock(folder, prefix)
        self._file = folder / f".{prefix}.about"
        # If two processes begin at once, the second one sees the first one's claim.
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
                # Without the release, the traceback would keep the lock alive.
                self._lock.release()
                raise

    def release(self) -> None:
        """Release the claim, so another process can write there."""
        self._file.unlink(missing_ok=True)
        self._lock.release()

    def _check_other_claims(self, about: str) -> None:
        """Check that no other process writes records of something else to the folder.

        Raises:
            InvalidOption: another process does.
        """
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
        """Whether the process of a claim still holds its lock. A killed process leaves its claim file, but no lock."""
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
