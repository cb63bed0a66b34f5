"""Loading of published EAGLE-3 heads: SafeAILab's and SpecForge's (``midlayer.*``), speculators' and RedHat's
(``layers.*``).

Both layouts have the same tensors. A tensor that is missing, not known or of another shape is an error: a head with a
layer of zeros would only draft badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph_capture.shard_styles import whole_weight
from speccompile.modes.eagle3.config import Eagle3Config
from speccompile.modes.eagle3.config_files import read_config
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.network.checkpoint_files import (
    CHECKPOINT_FILES,
    check_tensors,
    check_vocabulary,
    checkpoint_folder,
    read_tensors,
    renamed,
)
from speccompile.modes.network.made_for import check_made_for

#: Patterns of other names for the tensors, and replacements, applied in this order.
RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.(?=\d)", "layers."),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^draft_id_to_target_id$", "d2t"),
)


def load_eagle3(source: str | Path, target: PreTrainedModel) -> Eagle3Head:
    """Load a head for ``target``, in the target's dtype, on its device.

    If the checkpoint has no embedding, or no lm_head over the whole vocabulary, the head shares the target's tensor.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors`` (in any number of files) or
            ``pytorch_model.bin``; or the id of such a repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint was found, or it is for another target.
        HeadKeys: keys are renamed, missing, not known or of another shape. The message lists them.
    """
    folder = checkpoint_folder(source, CHECKPOINT_FILES)
    name = str(source)
    tensors = renamed(read_tensors(folder, name), RENAMED, name)
    config = read_config(folder, name, target, tensors)
    head = Eagle3Head(config)
    target_weights = _target_weights(config, target, tensors)
    t2d = tensors.pop("t2d", None)
    if "mask_hidden" in tensors:
        # speculators stores it with one more dimension.
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    _check_keys(head, tensors, target_weights, name)
    # A head with the target's whole vocabulary can also have a d2t.
    d2t = tensors.pop("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    check_vocabulary(d2t, t2d, config.draft_vocab_size, config.vocab_size, name)
    if head.d2t is not None:
        tensors["d2t"] = d2t.to(torch.int64)
    head.load_state_dict(tensors, strict=False)
    head = head.to(target.device, target.dtype).eval()
    head.share(**target_weights)
    check_made_for(folder, name, target)
    return head.requires_grad_(False)


def _target_weights(
    config: Eagle3Config, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The target's weights for tensors that the checkpoint leaves out, as arguments of :meth:`Eagle3Head.share`."""
    target_weights: dict[str, torch.Tensor] = {}
    for key, argument, module in (
        ("embed_tokens.weight", "embedding", target.get_input_embeddings()),
        ("lm_head.weight", "lm_head", target.get_output_embeddings()),
    ):
        if key in tensors or (argument == "lm_head" and config.tie_word_embeddings):
            continue
        rows = config.vocab_size if argument == "embedding" else config.draft_vocab_size
        assert isinstance(module, nn.Module)
        weight = whole_weight(module)
        if tuple(weight.shape) == (rows, config.hidden_size):
            target_weights[argument] = weight
    return target_weights


def _check_keys(
    head: Eagle3Head, tensors: Mapping[str, torch.Tensor], target_weights: Mapping[str, torch.Tensor], name: str
) -> None:
    """Check that each tensor of the head comes from the checkpoint or the target, and that each tensor of the
    checkpoint is used."""
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    for key, argument in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "lm_head")):
        if argument in target_weights or (key == "lm_head.weight" and head.config.tie_word_embeddings):
            expected.pop(key)
    expected.setdefault("d2t", (head.config.draft_vocab_size,))
    optional = {"d2t"} if head.d2t is None else set()
    check_tensors(tensors, expected, name, optional=optional, integers={"d2t"})
