"""Draft models by name, and whether their tokens are the target's."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.pretrained import load_model

_WHERE = "mode 'draft_target'"


def load_draft(name_or_path: str, target: ModelInfo) -> PreTrainedModel:
    """A draft model in the target's dtype, on its device.

    Raises:
        PretrainedError: the model does not exist, or its weights are not all there.
        DeviceMemoryFull: the target's device has not enough free memory for it.
    """
    return load_model(name_or_path, dtype=target.dtype, device=target.device)


def check_same_vocabulary(draft: PreTrainedModel, own: ModelInfo, target: PreTrainedModel, info: ModelInfo) -> None:
    """Token ids have to mean the same: as many of them, and, where both came with tokenizers, the same ones.

    Raises:
        InvalidOption: they differ; says how.
    """

    def refuse(reason: str) -> InvalidOption:
        advice = "; a draft model needs the target's vocabulary"
        return InvalidOption(where=_WHERE, name="draft", value=own.name, reason=f"{reason}{advice}")

    if own.vocab_size != info.vocab_size:
        raise refuse(f"its vocabulary has {own.vocab_size} tokens and the target's {info.vocab_size}")
    ids, target_ids = _token_ids(draft), _token_ids(target)
    if ids is None or target_ids is None:
        return
    for token, number in target_ids.items():
        if ids.get(token) != number:
            there = "is not in its vocabulary" if token not in ids else f"is its token {ids[token]}"
            raise refuse(f"token {number} of the target, {token!r}, {there}")


def _token_ids(model: PreTrainedModel) -> dict[str, int] | None:
    """Of the tokenizer that lies beside the checkpoint which the model was loaded from; None if none does."""
    folder = _folder(model)
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    ids: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return ids


def _folder(model: PreTrainedModel) -> Path | None:
    """Of its checkpoint: a local one, or in the cache of what came from the hub."""
    source: str = model.config._name_or_path
    if Path(source or "?").is_dir():
        return Path(source)
    try:
        cached = try_to_load_from_cache(source, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
