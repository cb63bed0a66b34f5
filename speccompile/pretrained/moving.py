"""Moves a loaded model to its device after a check of the free memory."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from speccompile.utils.device_memory import check_memory, memory_errors
from speccompile.utils.parameters import parameter_bytes

_LESS = "Load fewer bytes (dtype=torch.bfloat16, or a smaller model)"


def move_to(model: PreTrainedModel, device: torch.device) -> None:
    """Move the weights of ``model`` to ``device``, without transformers' ``device_map``, which needs accelerate.

    Raises:
        DeviceMemoryFull: the device does not have enough free memory.
    """
    what, weights = f"the weights of {type(model).__name__}", parameter_bytes(model)
    if model.device.type != device.type:
        check_memory(device, what, {"weights": weights}, advice=_LESS)
    with memory_errors(device, what, advice=_LESS, known={"weights": weights}):
        cast(Any, model).to(device)
