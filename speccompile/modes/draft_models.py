"""Draft models by name, and whether their tokens are the target's."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.graph_capture.support import ModelInfo
from speccompile.pretrained import load

_WHERE = "mode 'draft_target'"


def load_draft(name_or_path: str, target: ModelInfo) -> PreTrainedModel:
    """A draft model in the target's dtype, on its device.

    Raises:
        PretrainedError: there is no such model.
    """
    model, _ = load(name_or_path, dtype=target.dtype)
    # Its types know no devices but strings.
    return model.to(str(target.device))  # type: ignore[arg-type]


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
    ids, wanted = _token_ids(draft), _token_ids(target)
    if ids is None or wanted is None:
        return
    for token, number in wanted.items():
        if ids.get(token) != number:
            there = "is not in its vocabulary" if token not in ids else f"is its token {ids[token]}"
            raise refuse(f"token {number} of the target, {token!r}, {there}")


def _token_ids(model: PreTrainedModel) -> dict[str, int] | None:
    """Of the tokenizer in the folder that the model was loaded from; None if there is none."""
    folder = Path(model.config._name_or_path or "?")
    if not (folder / "tokenizer.json").is_file():
        return None
    ids: dict[str, int] = AutoTokenizer.from_pretrained(folder).get_vocab()
    return ids
