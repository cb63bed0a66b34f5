"""The files of a drafter's checkpoint: in a folder or on the hub, read as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from speccompile.errors import InvalidHead, error_line


def checkpoint_folder(source: str | Path, patterns: Sequence[str]) -> Path:
    """The folder ``source``, or that of the hub's repository of this id, of which files of these patterns are fetched.

    Raises:
        InvalidHead: it is no folder, and cannot be fetched.
    """
    path = Path(source)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = f"it is no folder, and cannot be fetched from the Hugging Face Hub ({error_line(error)})"
        raise InvalidHead(source=str(source), reason=reason) from error


def read_tensors(
    folder: Path, name: str, *, binaries: Sequence[str] = ("pytorch_model.bin",)
) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files in ``folder``; without any, those of the first of ``binaries`` that exists.

    Args:
        name: what messages call the checkpoint.

    Raises:
        InvalidHead: there are none, a file cannot be read, or a tensor is in two files.
    """
    files = sorted(folder.glob("*.safetensors"))
    binary = next((folder / file for file in binaries if (folder / file).exists()), None)
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            read = load_file(file)
            if twice := sorted(found.keys() & read.keys()):
                raise InvalidHead(source=name, reason=f"{twice[0]!r} is in {file.name} and in another file as well")
            found |= read
        if not files and binary is not None:
            found = dict(torch.load(binary, map_location="cpu", weights_only=True))
    except InvalidHead:
        raise
    except Exception as error:
        raise InvalidHead(source=name, reason=f"its weights cannot be read: {error_line(error)}") from error
    for key, value in found.items():
        if not isinstance(value, torch.Tensor):
            raise InvalidHead(source=name, reason=f"{key!r} is a {type(value).__name__}, and no tensor")
    if not found:
        raise InvalidHead(source=name, reason=f"there is neither a *.safetensors nor a {' or '.join(binaries)} in it")
    return found
