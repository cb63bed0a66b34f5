"""Whisper: texts equal to transformers' ``generate`` with the same audio."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, WhisperFeatureExtractor, WhisperTokenizer, pipeline

import speccompile
from speccompile import Speculator
from speccompile.errors import UnusableInputs
from support.encoder_decoders import FRAMES, MELS, audio, whisper


@cache
def wrapped() -> tuple[Any, Speculator]:
    model = whisper()
    return model, speccompile.wrap(model, "ngram", backend="eager", max_batch=2, max_len=128, tiers=(0, 2), scores=True)


LONG = {"input_features": audio(2, 3 * FRAMES + 40), "attention_mask": torch.ones(2, 3 * FRAMES + 40).long()}
LONG["attention_mask"][1, 2 * FRAMES :] = 0

CALLS: dict[str, dict[str, Any]] = {
    "its language is found": {"input_features": audio(3)},
    "language and task": {"input_features": audio(3), "language": "de", "task": "translate"},
    "timestamps": {"input_features": audio(3), "language": "en", "return_timestamps": True},
    "long audio": {**LONG, "language": "en", "return_timestamps": True},
    "earlier text as a prompt": {**LONG, "language": "en", "return_timestamps": True, "condition_on_prev_tokens": True},
    "thresholds": {
        **{**LONG, "language": "en", "return_timestamps": True, "temperature": (0.0,)},
        **{"logprob_threshold": -1.0, "compression_ratio_threshold": 1.35, "no_speech_threshold": 0.6},
    },
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_texts_are_those_of_transformers(call: dict[str, Any]) -> None:
    model, spec = wrapped()
    expected = model.generate(**call, max_new_tokens=20)
    found = spec.generate(**call, max_new_tokens=20)
    both = [item if isinstance(item, torch.Tensor) else item["sequences"] for item in (expected, found)]
    assert torch.equal(*both)
    assert len(set(both[0].flatten().tolist())) > 5


def test_requests_of_the_engine() -> None:
    model, spec = wrapped()
    heard = audio(3, seed=1)
    suppressed = model.generation_config.suppress_tokens, model.generation_config.begin_suppress_tokens
    expected = GenerationMixin.generate(
        model,
        heard,
        decoder_input_ids=torch.tensor([[3, 20, 30, 300]] * 3),
        max_new_tokens=20,
        do_sample=False,
        suppress_tokens=suppressed[0],
        begin_suppress_tokens=suppressed[1],
    )
    requests = [
        spec.engine.submit([3, 20, 30, 300], inputs={"input_features": row}, max_new_tokens=20) for row in heard
    ]
    assert [request.result().token_ids for request in requests] == expected[:, 4:].tolist()


def tokenizer() -> WhisperTokenizer:
    """A tokenizer of letters and timestamps."""
    vocabulary = {f"w{token}": token for token in range(299)} | {"<|endoftext|>": 299, "<|notimestamps|>": 300}
    vocabulary |= {f"<|{(token - 301) * 0.02:.2f}|>": token for token in range(301, 1801)}
    vocabulary |= {f"v{token}": token for token in range(1801, 1900)}
    ends = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    return WhisperTokenizer(vocab=vocabulary, merges=[], **ends)


@pytest.mark.parametrize("options", [{}, {"chunk_length_s": 1}], ids=str)
def test_the_pipeline(options: dict[str, Any]) -> None:
    model, spec = wrapped()
    # FRAMES frames of 160 samples are 0.6 seconds.
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)
    extractor.n_samples, extractor.nb_max_frames = 160 * FRAMES, FRAMES
    wave = np.random.default_rng(0).standard_normal(160 * FRAMES * 2).astype(np.float32)
    common = {"language": "en", "max_new_tokens": 20, "num_beams": 1}
    texts = [
        pipeline("automatic-speech-recognition", model=each, feature_extractor=extractor, tokenizer=tokenizer())(
            wave.copy(), generate_kwargs=common, return_timestamps=True, **options
        )
        for each in (model, spec)
    ]
    assert texts[0] == texts[1]
    assert texts[0]["text"]


def test_what_is_refused() -> None:
    _, spec = wrapped()
    with pytest.raises(UnusableInputs, match="input_features is missing"):
        spec.generate(language="en")
    with pytest.raises(UnusableInputs, match="reads floating-point numbers of 3 dimensions"):
        spec.generate(torch.ones((2, 5), dtype=torch.int64))
    with pytest.raises(UnusableInputs, match=f"reads {MELS} mel bins"):
        spec.generate(torch.zeros(1, MELS - 1, FRAMES))
    with pytest.raises(UnusableInputs, match="expects the mel input features to be of length"):
        spec.engine.submit([3], inputs={"input_features": torch.zeros(MELS, FRAMES - 2)})
    with pytest.raises(UnusableInputs, match="has no input 'pixel_values'"):
        spec.engine.submit([3], inputs={"pixel_values": torch.zeros(1, 3, 8, 8)})
