"""Published EAGLE-3 heads: SafeAILab's and SpecForge's (``midlayer.*``), speculators' and RedHat's (``layers.*``).

Both name the same tensors. A tensor that is not used, not there or of another shape is never passed over: a head with
a layer of zeros would draft badly, without any other sign.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import HeadKeys, InvalidHead, InvalidInput
from speccompile.modes.eagle3.config import Eagle3Config
from speccompile.modes.eagle3.config_files import read_config
from speccompile.modes.eagle3.head import Eagle3Head
from speccompile.modes.network.checkpoint_files import checkpoint_folder, read_tensors
from speccompile.sampling.draft_vocab import check_d2t, target_ids

CHECKPOINT_FILES = ["config.json", "*.safetensors", "pytorch_model.bin"]

#: Other names of the same tensors, tried in this order.
RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.(?=\d)", "layers."),
    (r"^midlayer\.", "layers.0."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^draft_id_to_target_id$", "d2t"),
)

#: A missing key is reported together with an unknown one of at least this similarity.
MIN_SIMILARITY = 0.6


def load_eagle3(source: str | Path, target: PreTrainedModel) -> Eagle3Head:
    """Load a head for ``target``, in its dtype, on its device.

    An embedding, or an lm_head over the whole vocabulary, that the checkpoint leaves out is the target's own tensor.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors`` (in any number of files) or
            ``pytorch_model.bin``; or the id of such a repository on the Hugging Face Hub.

    Raises:
        InvalidHead: no checkpoint is there, or it is not one of this target.
        HeadKeys: lists the keys that are renamed, missing, not known or of another shape.
    """
    folder = checkpoint_folder(source, CHECKPOINT_FILES)
    name = str(source)
    tensors = _own_names(read_tensors(folder, name), name)
    config = read_config(folder, name, target, tensors)
    head = Eagle3Head(config)
    target_weights = _target_weights(config, target, tensors)
    t2d = tensors.pop("t2d", None)
    _check_keys(head, tensors, target_weights, name)
    # A head of the whole vocabulary may list it all the same.
    d2t = tensors.pop("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    _check_vocabulary(d2t, t2d, config, name)
    if head.d2t is not None:
        tensors["d2t"] = d2t.to(torch.int64)
    head.load_state_dict(tensors, strict=False)
    head = head.to(target.device, target.dtype).eval()
    head.share(**target_weights)
    return head.requires_grad_(False)


def _own_names(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """By the names that :class:`Eagle3Head` has for them."""
    given: dict[str, str] = {}
    renamed: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        own = key
        for pattern, replacement in RENAMED:
            own = re.sub(pattern, replacement, own)
        if own in renamed:
            raise InvalidHead(source=name, reason=f"{given[own]!r} and {key!r} are two names of one tensor")
        renamed[own], given[own] = value, key
    return renamed


def _target_weights(
    config: Eagle3Config, target: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What is not in the checkpoint and the target can lend, as :meth:`Eagle3Head.share` takes it."""
    target_weights: dict[str, torch.Tensor] = {}
    for key, argument, module in (
        ("embed_tokens.weight", "embedding", target.get_input_embeddings()),
        ("lm_head.weight", "lm_head", target.get_output_embeddings()),
    ):
        if key in tensors or (argument == "lm_head" and config.tie_word_embeddings):
            continue
        rows = config.vocab_size if argument == "embedding" else config.draft_vocab_size
        assert isinstance(module, nn.Module)
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if tuple(weight.shape) == (rows, config.hidden_size):
            target_weights[argument] = weight
    return target_weights


def _check_keys(
    head: Eagle3Head, tensors: Mapping[str, torch.Tensor], target_weights: Mapping[str, torch.Tensor], name: str
) -> None:
    """Every tensor of the head comes from the checkpoint or the target, and every one of the checkpoint is used."""
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    for key, argument in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "lm_head")):
        if argument in target_weights or (key == "lm_head.weight" and head.config.tie_word_embeddings):
            expected.pop(key)
    expected.setdefault("d2t", (head.config.draft_vocab_size,))
    missing = {key for key in expected if key not in tensors}
    if head.d2t is None:
        missing.discard("d2t")
    tied = {"lm_head.weight"} if head.config.tie_word_embeddings else set()
    extra = [key for key in tensors if key not in expected and key not in tied]
    problems: list[str] = []
    for key in extra:
        shape = tuple(tensors[key].shape)
        likely = _closest_key(key, [other for other in missing if expected[other] == shape])
        if likely is None:
            problems.append(f"not known: {key} {list(shape)}")
        else:
            missing.discard(likely)
            problems.append(f"renamed: {key} {list(shape)} looks like {likely}")
    problems += [f"missing: {key} {list(expected[key])}" for key in expected if key in missing]
    for key, shape in expected.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            problems.append(f"of another shape: {key} is {list(tensors[key].shape)} and has to be {list(shape)}")
        elif key in tensors and key != "d2t" and not tensors[key].is_floating_point():
            problems.append(f"of another kind: {key} is {tensors[key].dtype} and has to hold floating-point numbers")
    if problems:
        raise HeadKeys(source=name, problems="".join(f"\n  {problem}" for problem in problems))


def _closest_key(key: str, others: Iterable[str]) -> str | None:
    found = difflib.get_close_matches(key, list(others), n=1, cutoff=MIN_SIMILARITY)
    return found[0] if found else None


def _check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor | None, config: Eagle3Config, name: str) -> None:
    try:
        check_d2t(d2t, config.vocab_size)
    except InvalidInput as error:
        raise InvalidHead(source=name, reason=str(error).rstrip(".")) from error
    if config.draft_vocab_size == config.vocab_size and bool(d2t.any()):
        raise InvalidHead(source=name, reason="its d2t reorders the whole vocabulary")
    if t2d is None:
        return
    if tuple(t2d.shape) != (config.vocab_size,):
        raise HeadKeys(
            source=name,
            problems=f"\n  of another shape: t2d is {list(t2d.shape)} and has to be {[config.vocab_size]}",
        )
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    drafted[target_ids(d2t.long())] = True
    if not torch.equal(drafted, t2d.bool()):
        raise InvalidHead(source=name, reason="its t2d does not mark the tokens that its d2t names")
