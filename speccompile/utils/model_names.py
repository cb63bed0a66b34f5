"""What the name of a model means: ``smollm2``, a folder, a GGUF file or a hub id. Imports neither torch nor
transformers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from speccompile.errors import PretrainedError

SMOLLM2 = "smollm2"
TINY = "tiny"

MODEL_HELP = f"{SMOLLM2}, {TINY} (random weights), a local folder, a GGUF file or a hub id."

# "name" or "organisation/name".
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` can only be a hub id: there is no such folder, and it is neither a path nor a known name."""
    return name not in (SMOLLM2, TINY) and not os.path.isdir(name) and not is_gguf(name)


def check_model_name(name: str) -> None:
    """Check that a local path exists; whether the hub has an id is not asked.

    Raises:
        PretrainedError: ``name`` is a path, and there is no such folder or file.
    """
    if is_gguf(name):
        if not Path(name).is_file():
            raise PretrainedError(f"no such file: {name!r}.")
    elif is_hub_id(name) and not _HUB_ID.fullmatch(name):
        if Path(name).is_file():
            raise PretrainedError(f"{name!r} is a file; give the folder of a checkpoint, or a GGUF file (*.gguf).")
        raise PretrainedError(f"no such folder: {name!r}.")
