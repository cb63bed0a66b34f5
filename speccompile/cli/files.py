"""Checks of the user's files, with errors that name the option. Imports as in ``commands.py``."""

from __future__ import annotations

import os
from pathlib import Path

from speccompile.errors import InvalidOption


def check_output_file(option: str, path: Path | None) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        InvalidOption: its folder does not exist, or cannot be written to.
    """
    if path is None:
        return
    folder = path.parent
    if not folder.is_dir():
        raise _invalid(option, path, f"there is no folder {str(folder)!r}; create it, or give another path")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _invalid(option, path, "it cannot be written (permission denied); give another path")


def check_quantize(
    output: Path | None, form: str, calibration: Path | None, head: Path | None, *, verify: bool
) -> None:
    """Check the options of ``quantize``.

    Raises:
        InvalidOption: an option is missing, has no effect, or has a value that is not valid.
    """
    given = {"--output": output, "--calibration": calibration, "--head": head}
    if verify:
        for option, path in given.items():
            if path is not None:
                raise _invalid(option, path, "--verify writes nothing; leave one of them out")
        return
    if output is None:
        reason = "it is missing; give the path of a new folder, or --verify to compare a packed folder with its hashes"
        raise InvalidOption(where="the command line", name="--output", value=None, reason=reason)
    if form not in ("int4", "int8", "stored"):
        reason = "choose from int4, int8, stored"
        raise InvalidOption(where="the command line", name="--weights", value=form, reason=reason)
    if calibration is not None and form != "int4":
        raise _invalid("--calibration", calibration, f"{form} is not rounded by a calibration; leave it out")


def read_text(option: str, path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        InvalidOption: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(option, path, f"it cannot be read as UTF-8 text ({error})") from error


def _invalid(option: str, path: Path, reason: str) -> InvalidOption:
    return InvalidOption(where="the command line", name=option, value=str(path), reason=reason)
