"""A drafter for each mode that needs one, for tests over all modes: a new mode is added here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from speccompile.heads import DFlashHead, Eagle3Head, EagleHead, HydraHeads, MedusaHeads, MlpSpeculator, MtpHead
from support import gemma4
from support.drafters import random_drafter


def drafts_of_modes(model: PreTrainedModel, count: int) -> dict[str, Any]:
    """By mode, a random drafter of chains up to ``count``."""
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    eagle3, mtp = Eagle3Head.random(model, taps=(0, 1, 1)), MtpHead.random(model, count)
    return {
        "dflash": DFlashHead.random(model, count + 1),
        "draft_target": random_drafter(vocab=vocab),
        "eagle": EagleHead.random(model),
        "eagle3": eagle3,
        "eagle3_one_model": eagle3,
        "gemma4_assistant": gemma4.small_head(vocab_size=vocab),
        "hydra": HydraHeads.random(model, count),
        "medusa": MedusaHeads(count, 1, hidden, vocab).eval(),
        "mlp_speculator": MlpSpeculator.random(model, count),
        "mtp": mtp,
        "mtp_eagle": mtp,
        "mtp_eagle_one_model": mtp,
        "user_provided": lambda tokens, length, draft_len: (tokens[:, :draft_len], length.clamp(max=draft_len)),
    }


def target_of(mode: str, model: PreTrainedModel) -> PreTrainedModel:
    """``model``, or what the mode drafts for, of the same vocabulary."""
    if mode != "gemma4_assistant":
        return model
    vocab = model.config.vocab_size
    return gemma4.target(vocab_size=vocab, vocab_size_per_layer_input=vocab)


def options_of(mode: str, drafts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options of ``wrap`` that the mode needs."""
    if mode == "save_hidden_states":
        return {"output_directory": folder, "eagle3_layers_to_capture": (0,)}
    return {"draft": drafts[mode]} if mode in drafts else {}
