"""Tiny encoder-decoders with random weights whose texts differ from token to token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB, MELS, FRAMES = 120, 16, 60

_LAYERS = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
}
_BART = {**_LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 96, "forced_eos_token_id": None}
_T5 = {
    **{"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    **{"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
}


def varied(model: PreTrainedModel) -> PreTrainedModel:
    """The model with larger weights. With those of its initialisation, all tokens of a text are equal."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 0.6 if "embed" in name or "shared" in name else 1.5 * parameter.shape[-1] ** -0.5
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def whisper(**options: object) -> WhisperForConditionalGeneration:
    """A Whisper for audio of ``FRAMES`` frames, with the tokens that its ``generate`` needs."""
    sizes = {"vocab_size": 1900, "num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 128}
    config = WhisperConfig(
        **{**_LAYERS, **sizes, "suppress_tokens": None, "begin_suppress_tokens": None, **options}  # type: ignore[arg-type]
    )
    model = varied(WhisperForConditionalGeneration(config))
    tokens = dict(
        no_timestamps_token_id=300,
        suppress_tokens=[7, 8, 9],
        begin_suppress_tokens=[10, 2],
        # As in published checkpoints.
        forced_decoder_ids=[[1, None], [2, 30]],
        is_multilingual=True,
        lang_to_id={"<|en|>": 20, "<|de|>": 21},
        task_to_id={"transcribe": 30, "translate": 31},
        max_initial_timestamp_index=10,
        return_timestamps=False,
        prev_sot_token_id=40,
    )
    for name, value in tokens.items():
        # Most are no fields of the class.
        setattr(model.generation_config, name, value)
    return model


TRANSLATORS: dict[str, Callable[[], PreTrainedModel]] = {
    "bart": lambda: BartForConditionalGeneration(BartConfig(**_BART)),
    "marian": lambda: MarianMTModel(MarianConfig(**_BART)),
    "m2m100": lambda: M2M100ForConditionalGeneration(M2M100Config(**_BART)),
    "mbart": lambda: MBartForConditionalGeneration(MBartConfig(**_BART)),
    "pegasus": lambda: PegasusForConditionalGeneration(PegasusConfig(**_BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5)),
    "mt5": lambda: MT5ForConditionalGeneration(MT5Config(**_T5)),
    "umt5": lambda: UMT5ForConditionalGeneration(UMT5Config(**_T5)),
}


def audio(rows: int, frames: int = FRAMES, seed: int = 0) -> torch.Tensor:
    """Random mel features ``[rows, MELS, frames]``."""
    return torch.randn((rows, MELS, frames), generator=torch.Generator().manual_seed(seed))
