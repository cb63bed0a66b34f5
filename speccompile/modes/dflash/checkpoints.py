"""Loading and saving of DFlash and DSpark heads.

All layouts have the same tensors. A tensor that is missing, not known or of another shape is an error: a head with a
layer of zeros would only draft badly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph_capture.shard_styles import is_shard, whole_weight
from speccompile.modes.dflash.config import check_config, check_target, embedding_scale
from speccompile.modes.dflash.config_files import ASSISTANT, read_config
from speccompile.modes.dflash.head import DFlashHead
from speccompile.modes.dflash.speculators import needs_speculators, speculators_config
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    check_vocabulary,
    checkpoint_folder,
    read_tensors,
    renamed,
)
from speccompile.modes.network.made_for import check_made_for, noted
from speccompile.sampling.draft_vocab import target_ids
from speccompile.utils.whole_files import write_whole

#: Patterns of other names for the tensors, and replacements, applied in this order.
RENAMED = (
    (r"^model\.", ""),
    (r"^encoder\.fc\.", "fc."),
    (r"^encoder\.output_norm_enc\.", "hidden_norm."),
    # SpecForge's Domino heads.
    (r"^(prefix_gru|embed_proj)\.", r"domino_head.\1."),
)

#: Tensors that drafting does not need: DSpark's confidence head (policies choose the draft length), and what
#: speculators' training compares with.
UNUSED = ("confidence_head.", "verifier_lm_head.", "verifier_norm.")
#: The largest difference, relative to the largest weight, between a checkpoint's copy of a target's weight and the
#: weight: both are rounded to some dtype.
MAX_DIFFERENCE = 2**-7


def load_dflash(source: str | Path, target: PreTrainedModel) -> DFlashHead:
    """Load a head for ``target``, in the target's dtype, on its device.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors`` (in any number of files) or
            ``pytorch_model.bin``; or the id of such a repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint was found, or it is for another target.
        HeadKeys: keys are renamed, missing, not known or of another shape. The message lists them.
    """
    folder, name = checkpoint_folder(source, CHECKPOINT_FILES), str(source)
    config = read_config(folder, name, target)
    check_config(config, name)
    check_target(config, name, target)
    head = DFlashHead(config, target)
    tensors = renamed(read_tensors(folder, name), RENAMED, name)
    tensors = {key: value for key, value in tensors.items() if not key.startswith(UNUSED)}
    own = head.own_state()
    _check_copies(tensors, own, target, name)
    # Heads with the target's vocabulary can also have these.
    d2t, t2d = tensors.get("d2t"), tensors.pop("t2d", None)
    if head.d2t is None:
        tensors.pop("d2t", None)
    check_tensors(tensors, {key: tuple(value.shape) for key, value in own.items()}, name, integers={"d2t"})
    check_vocabulary(d2t, t2d, config.draft_vocab_size or head.vocab_size, head.vocab_size, name)
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(tensors[key])
    for module in head.own:
        module.requires_grad_(False)
    check_made_for(folder, name, target)
    return head


def _check_copies(
    tensors: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor], target: PreTrainedModel, name: str
) -> None:
    """Remove a checkpoint's copies of the target's embedding and lm_head, which the head reads from the target.

    Raises:
        InvalidHead: a copy differs from the target's weight.
    """
    for key, module in (
        ("embed_tokens.weight", target.get_input_embeddings()),
        ("lm_head.weight", target.get_output_embeddings()),
    ):
        if key in own or (copied := tensors.pop(key, None)) is None or is_shard(target):
            continue
        weight = whole_weight(module).detach().cpu().float()
        same = copied.shape == weight.shape
        if not same or bool((copied.float() - weight).abs().max() > MAX_DIFFERENCE * weight.abs().max()):
            raise InvalidHead(source=name, reason=f"its {key} is not that of this target")


def save_dflash(
    head: DFlashHead, folder: str | Path, *, dtype: torch.dtype = torch.float16, target_id: str | None = None
) -> None:
    """Write ``config.json`` and ``model.safetensors`` of transformers' assistant model; or in speculators' layout, if
    the head has a draft vocabulary, a bias by the token before, or drafts from the newest token on.

    Args:
        folder: created if it does not exist. Each file is complete or absent, also after the process is killed.
        dtype: the dtype of the written weights.
        target_id: the target's :func:`~speccompile.hidden_states.target_id.target_id`, written to the config. A later
            load for another target then warns.

    Raises:
        InvalidHead: the layout does not support the head's variant.
        OSError: a file cannot be written.
    """
    speculators = needs_speculators(head.config)
    config = config_of(head, str(dtype).removeprefix("torch.")) | noted(target_id)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, value in head.own_state().items():
        name = key if speculators else key.replace("hidden_norm.", "encoder.output_norm_enc.")
        name = f"encoder.{name}" if key.startswith("fc.") and not speculators else name
        tensors[name] = value.detach().to("cpu", torch.int64 if key == "d2t" else dtype).contiguous()
    if head.d2t is not None:
        tensors["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool)
        tensors["t2d"][target_ids(head.d2t.cpu())] = True
    write_whole(path / "model.safetensors", save(tensors, {"format": "pt"}))
    write_whole(path / "config.json", (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())


def config_of(head: DFlashHead, dtype: str) -> dict[str, Any]:
    """The config.json of a head, in speculators' layout or of transformers' assistant model.

    Raises:
        InvalidHead: the layout does not support the head's variant.
    """
    if needs_speculators(head.config):
        return speculators_config(head.config, head.vocab_size, dtype)
    return assistant_config(head, dtype)


def can_be_saved(head: DFlashHead) -> bool:
    """Whether :func:`save_dflash` has a layout for the head's variant."""
    try:
        config_of(head, "float32")
    except InvalidHead:
        return False
    return True


def assistant_config(head: DFlashHead, dtype: str) -> dict[str, Any]:
    """The config of transformers' assistant model.

    Raises:
        InvalidHead: transformers' class does not support the head's variant.
    """
    config, scale = head.config, embedding_scale(head.embed_tokens)
    default = (config.embedding_scale, config.logit_scale, config.logit_softcap) == (scale, 1.0, None)
    windows = {window for window in config.windows if window is not None}
    if config.attention_bias or any(config.causal) or len(windows) > 1 or not default:
        reason = "transformers' assistant model has no biases, causal layers, scales, or windows of two sizes"
        raise InvalidHead(source="that was given", reason=reason)
    layers = config.num_hidden_layers
    kinds = ["sliding_attention" if config.window(layer) else "full_attention" for layer in range(layers)]
    return {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT,
        "dtype": dtype,
        **config.layer_keys(),
        "layer_types": kinds,
        # The key must be a number also if no layer has a window.
        "sliding_window": min(windows) - 1 if windows else config.max_position_embeddings,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
    }
