"""Detection of the kinds of published draft heads, for error messages and for mode ``auto``.

The configs of EAGLE's first two generations are those of a language model, so only their tensors identify them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

#: Keys of the config.json of Medusa heads, in the layouts of FasterDecoding and vLLM.
_MEDUSA_KEYS = ("medusa_num_heads", "medusa_num_layers")
_MEDUSA_TENSOR = re.compile(r"(medusa_heads?\.)?\d+\.\d+\.(linear\.)?weight")


def is_medusa(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of Medusa heads."""
    return config.get("model_type") == "medusa" or any(key in config for key in _MEDUSA_KEYS)


def unread_kind(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The kind of a known head that is not an EAGLE-3 head, as a part of a sentence, with a remedy. None for other
    files.

    Args:
        tensors: the tensors of the checkpoint. Their names do not begin with ``model.``.
    """
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    instead = "such heads are not supported; use an EAGLE-3 head of this target"
    if is_medusa(config) or any(_MEDUSA_TENSOR.fullmatch(key) for key in tensors):
        return "a checkpoint of Medusa heads; use mode='medusa'"
    if config.get("speculators_model_type") in ("dflash", "dflash2", "dspark"):
        return "a DFlash or DSpark head; use mode='dflash'"
    if config.get("speculators_model_type") == "eagle" or is_eagle(tensors):
        return "an EAGLE-1 or EAGLE-2 head, which reads only the target's last hidden state; use mode='eagle'"
    if eagle.get("use_aux_hidden_state") is False:
        return f"a head without auxiliary hidden states (eagle_config.use_aux_hidden_state=False); {instead}"
    if (steps := eagle.get("parallel_draft_step")) not in (None, 1):
        return f"a head that drafts several tokens at once (eagle_config.parallel_draft_step={steps!r}); {instead}"
    return None


def is_eagle(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether ``fc`` joins an embedding and one hidden state, and no layer has a norm for the hidden state."""
    fc = tensors.get("fc.weight")
    joins = fc is not None and fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]
    return joins and not any(key.endswith("hidden_norm.weight") for key in tensors)
