"""The target of a head's checkpoint, as its config names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from speccompile.graph_capture.shard_styles import is_shard
from speccompile.hidden_states.target_id import is_id_of, target_id
from speccompile.modes.network.config_keys import read_keys
from speccompile.utils.warn import warn_caller

#: The key of the config that holds this package's own entries. Readers of published layouts ignore it.
KEY = "speccompile"


def noted(target: str | None) -> dict[str, Any]:
    """The entries of a config for the :func:`target_id`; empty if the id is not known."""
    return {} if target is None else {KEY: {"target": target}}


def check_made_for(folder: Path, name: str, target: PreTrainedModel) -> None:
    """Warn if the config in ``folder`` names a target other than ``target``. Published heads name no target.

    Args:
        name: the checkpoint's name, for the message.
    """
    path = folder / "config.json"
    # A folder with MTP modules can be without a config.
    own = read_keys(path, name).get(KEY) if path.exists() else None
    theirs = own.get("target") if isinstance(own, dict) else None
    if isinstance(theirs, str) and not is_shard(target) and not is_id_of(theirs, target):
        warn_caller(
            f"the head {name} was trained for the target {theirs}, and this is {target_id(target)}: it may draft badly"
        )
