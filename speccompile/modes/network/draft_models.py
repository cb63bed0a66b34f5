"""Draft models by name: loading, configs, and the check of their vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel

from speccompile.errors import InvalidHead, InvalidOption, PretrainedError
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.network.checkpoint_files import read_tensors, renamed
from speccompile.modes.network.head_kinds import unread_kind
from speccompile.pretrained import load_model
from speccompile.utils.declared_quantization import CONFIG
from speccompile.utils.hub import unavailable
from speccompile.utils.model_names import SMOLLM2, is_gguf

_WHERE = "mode 'draft_target'"
#: The largest difference in size of two vocabularies that are taken for the same one with other padding, if there are
#: no tokenizers. Qwen2.5's models have such vocabularies. Source: llama.cpp's ``SPEC_VOCAB_MAX_SIZE_DIFFERENCE``.
MOST_PADDING = 128


def load_draft(name_or_path: str, target: ModelInfo) -> PreTrainedModel:
    """A draft model in the target's dtype, on its device.

    Raises:
        PretrainedError: the model does not exist, or some of its weights are missing.
        InvalidHead: it is a draft head, not a model.
        DeviceMemoryFull: the target's device has not enough free memory for it.
    """
    try:
        return load_model(name_or_path, dtype=target.dtype, device=target.device)
    except PretrainedError as error:
        # The config of a head can be that of a language model.
        if kind := _kind_of_head(name_or_path):
            raise InvalidHead(source=name_or_path, reason=f"it is {kind}") from error
        raise


def draft_config(name_or_path: str) -> dict[str, Any]:
    """The config.json of a draft model or head by name; empty if it does not exist, or the hub cannot be reached."""
    if name_or_path == SMOLLM2 or name_or_path.startswith("self:") or is_gguf(name_or_path):
        return {}
    if unavailable(name_or_path, CONFIG) is not None:
        # Without this check transformers retries for half a minute.
        return {}
    try:
        config, _ = PretrainedConfig.get_config_dict(name_or_path)
    except (OSError, ValueError):
        return {}
    return config


def _kind_of_head(source: str) -> str | None:
    folder = _folder(source, "config.json")
    if folder is None:
        return None
    try:
        tensors = renamed(read_tensors(folder, source), ((r"^model\.", ""),), source)
    except InvalidHead:
        return None
    return unread_kind(draft_config(source), tensors)


def check_same_vocabulary(draft: PreTrainedModel, own: ModelInfo, target: PreTrainedModel, info: ModelInfo) -> None:
    """Check that the token ids of draft model and target have the same meaning.

    Vocabularies can be padded to different sizes. If both models have tokenizers, these are compared, else the sizes.

    Raises:
        InvalidOption: they differ. The message states the first difference.
    """

    def refuse(reason: str) -> InvalidOption:
        advice = "; a draft model needs the target's vocabulary"
        return InvalidOption(where=_WHERE, name="draft", value=own.name, reason=f"{reason}{advice}")

    ids, target_ids = _token_ids(draft), _token_ids(target)
    if ids is None or target_ids is None:
        if abs(own.vocab_size - info.vocab_size) > MOST_PADDING:
            raise refuse(f"its vocabulary has {own.vocab_size} tokens and the target's {info.vocab_size}")
        return
    for token, number in target_ids.items():
        if ids.get(token) != number:
            there = "is not in its vocabulary" if token not in ids else f"is its token {ids[token]}"
            raise refuse(f"token {number} of the target, {token!r}, {there}")


def _token_ids(model: PreTrainedModel) -> dict[str, int] | None:
    """The vocabulary of the tokenizer in the model's checkpoint; None if there is no tokenizer."""
    folder = _folder(model.config._name_or_path, "tokenizer.json")
    if folder is None:
        return None
    ids: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return ids


def _folder(source: str, file: str) -> Path | None:
    """The folder of a checkpoint that has ``file``: a local folder, or one in the hub's cache. None if it does not
    exist."""
    if Path(source or "?").is_dir():
        return Path(source) if (Path(source) / file).is_file() else None
    try:
        cached = try_to_load_from_cache(source, file)
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
