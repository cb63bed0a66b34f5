"""Saving of MTP modules, with the names in checkpoints of the target's family."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from speccompile.errors import InvalidHead
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.hidden_states.target_id import target_id
from speccompile.modes.mtp.checkpoints import Modules
from speccompile.modes.mtp.head import SOURCE, MtpHead
from speccompile.modes.mtp.layouts import LAYOUTS
from speccompile.modes.network.made_for import noted
from speccompile.utils.whole_files import write_whole

#: The entry of ``architectures`` in the config of a folder that has only modules, and no model.
ARCHITECTURE = "MtpModules"


def save_mtp(head: MtpHead, target: PreTrainedModel, folder: str | Path, *, dtype: torch.dtype = torch.float16) -> None:
    """Write ``config.json`` and ``model.safetensors`` with the modules' own tensors.

    The layout is that of the target's family (MiMo, Ernie 4.5, Qwen3-Next), or DeepSeek-V3's, where modules follow the
    target's layers.

    Args:
        target: the target of the modules.
        folder: created if it does not exist. Each file is complete or absent, also after the process is killed.
        dtype: the dtype of the written weights.

    Raises:
        InvalidHead: the layout has only one module, and the head has more.
        OSError: a file cannot be written.
    """
    layout = next((known for known in LAYOUTS if known.variant == head.variant), LAYOUTS[0])
    layers, modules = len(decoder_layers(target)[1]), len(head.layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in _as_loaded(head, target).items():
        key = layout.published_name(name, layers)
        if key in tensors or layout.own_name(key, int(name.split(".")[1])) != name:
            reason = f"the layout of {layout.name} has one module, got {modules}; save head.first()"
            raise InvalidHead(source=SOURCE, reason=reason)
        value = value.detach().to("cpu", dtype if value.is_floating_point() else value.dtype)
        tensors[key] = value.contiguous().clone()
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(target.config.get_text_config(decoder=True)).to_dict()
    config |= {"architectures": [ARCHITECTURE], "num_nextn_predict_layers": modules}
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    config |= noted(target_id(target))
    write_whole(path / "model.safetensors", save(tensors, {"format": "pt"}))
    write_whole(path / "config.json", (json.dumps(config, indent=2, sort_keys=True, default=str) + "\n").encode())


def _as_loaded(head: MtpHead, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The modules' tensors. Weights that transformers joins when it loads a checkpoint (experts) are split again."""
    modules: Any = Modules(head)
    conversions = getattr(target, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(target, add_legacy=False)
    # Changes of prefixes are for names in the whole model.
    modules._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
    found: dict[str, torch.Tensor] = revert_weight_conversion(modules, modules.state_dict())
    return found
