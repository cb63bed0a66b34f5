"""Inductor's cache folder, or a temporary folder that replaces it in this process if it cannot be written.

Inductor writes to its folder even if all files that it needs exist: locks, and sources that it compares.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from speccompile.errors import Degraded
from speccompile.utils.storage import remove_with_process
from speccompile.utils.torch_private import inductor_cache_dir
from speccompile.utils.warn import warn_caller

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
#: Size of a trial file. A disk that is nearly full accepts a few bytes, but no kernel.
TRIAL_BYTES = 2**18
#: Errors after which another folder may help.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR})
FULL = os.strerror(errno.ENOSPC)


@dataclass
class _Replacement:
    """``folder`` replaces ``original``. If it is ``linked``, it has links to the original's files."""

    original: str
    folder: Path
    error: OSError
    linked: bool
    warned: bool = False

    @property
    def in_use(self) -> bool:
        return os.environ.get(VARIABLE) == str(self.folder)


_replacements: list[_Replacement] = []


def _replacement() -> _Replacement | None:
    return _replacements[-1] if _replacements and _replacements[-1].in_use else None


def replaced_inductor_folder() -> str | None:
    """Return the original folder if it was replaced, else None."""
    replacement = _replacement()
    return None if replacement is None else replacement.original


def make_inductor_folder_writable() -> None:
    """Replace Inductor's cache folder if it cannot be written. Call this before Inductor compiles or loads."""
    try:
        _try(Path(inductor_cache_dir()))
    except OSError as error:
        _replace(error, linked=True)


def replace_inductor_folder_after(failure: BaseException) -> bool:
    """Replace the folder by an empty one if it could not be written, for example on a full disk. The empty folder has
    no links: a compiler may have left partial files, and would write through links to them.

    Returns:
        Whether the folder was replaced, so another attempt may succeed.
    """
    error, replacement = write_error(failure), _replacement()
    if error is None or not (replacement is None or replacement.linked):
        return False
    return _replace(error, linked=False)


def write_error(failure: BaseException) -> OSError | None:
    """Return the error of a folder that cannot be written, if ``failure`` is one or was caused by one."""
    error: BaseException | None = failure
    while error is not None:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            return error
        if FULL in str(error):
            # Raised by the C++ compiler, which is another process.
            return OSError(errno.ENOSPC, FULL)
        error = error.__cause__ or error.__context__
    return None


def warn_of_lost_kernels() -> None:
    """Warn once if the folder that replaces Inductor's has kernels that the original lacks."""
    replacement = _replacement()
    if replacement is None or replacement.warned:
        return
    if all(path.is_symlink() for path in replacement.folder.rglob("*.so")):
        return
    replacement.warned = True
    warn_caller(
        f"Inductor's cache folder {replacement.original} cannot be written ({replacement.error.strerror}), so its "
        f"kernels last only as long as this process, and every other process compiles them again. Set {VARIABLE} to a "
        "folder that can be written, or to one that was filled by the same wrap",
        Degraded,
    )


def _try(folder: Path) -> None:
    """Write a trial file.

    Raises:
        OSError: the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix="speccompile-") as file:
        file.write(bytes(TRIAL_BYTES))
        file.flush()


def _replace(error: OSError, *, linked: bool) -> bool:
    # torch stores its folder in the variable before it fails.
    original = replaced_inductor_folder() or os.environ[VARIABLE]
    try:
        folder = Path(tempfile.mkdtemp(prefix="speccompile-inductor-"))
        remove_with_process(folder)
        if linked:
            with contextlib.suppress(OSError, shutil.Error):
                # Links to locks are left out: Inductor does not open locks through links.
                locks = shutil.ignore_patterns("*.lock")
                shutil.copytree(original, folder, ignore=locks, copy_function=os.symlink, dirs_exist_ok=True)
        _try(folder)
    except OSError:
        return False
    _replacements.append(_Replacement(original, folder, error, linked))
    os.environ[VARIABLE] = str(folder)
    return True
