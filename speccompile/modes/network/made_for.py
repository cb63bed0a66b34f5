"""The target that a head's checkpoint was made for, where its config says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from speccompile.graph_capture.shard_styles import is_shard
from speccompile.hidden_states.target_id import is_id_of, target_id
from speccompile.modes.network.config_keys import read_keys
from speccompile.utils.warn import warn_caller

#: The key of the config that has what is this package's own; readers of published layouts pass it over.
KEY = "speccompile"


def noted(target: str | None) -> dict[str, Any]:
    """What a config says of the :func:`target_id`; nothing if it is not known."""
    return {} if target is None else {KEY: {"target": target}}


def check_made_for(folder: Path, name: str, target: PreTrainedModel) -> None:
    """Warn if the config in ``folder`` says that its head was made for another target than ``target``. Published heads
    say nothing.

    Args:
        name: what the message calls the checkpoint.
    """
    path = folder / "config.json"
    # Files of MTP modules may be without one.
    own = read_keys(path, name).get(KEY) if path.exists() else None
    theirs = own.get("target") if isinstance(own, dict) else None
    if isinstance(theirs, str) and not is_shard(target) and not is_id_of(theirs, target):
        warn_caller(
            f"the head {name} was trained for the target {theirs}, and this is {target_id(target)}: it may draft badly"
        )
