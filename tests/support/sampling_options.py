"""Sampling options of a request, drawn by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

VOCAB = 40
tokens = st.integers(0, VOCAB - 1)
few = st.integers(0, 5)
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0.05, 3),
    "top_k": st.integers(0, 60),
    "top_p": st.just(0.0) | st.floats(0.05, 1),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0.05, 1),
    "epsilon_cutoff": st.floats(0, 0.5),
    "eta_cutoff": st.floats(0, 0.9),
    "repetition_penalty": st.floats(0.3, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(tokens, st.floats(-9, 9).filter(bool), max_size=6),
    # Few tokens, so that sequences occur and several end alike.
    "sequence_bias": st.dictionaries(
        st.lists(few, min_size=1, max_size=4).map(tuple), st.floats(-9, 9).filter(bool), min_size=1, max_size=6
    ),
    "remove_invalid_values": st.booleans(),
    "renormalize_logits": st.booleans(),
    "suppress_tokens": st.lists(tokens, max_size=6),
    "begin_suppress_tokens": st.lists(tokens, max_size=6),
    "bad_words_ids": st.lists(st.lists(few, min_size=1, max_size=4), max_size=5),
    "no_repeat_ngram_size": st.integers(0, 5),
    "min_new_tokens": st.integers(0, 6),
    "min_length": st.integers(0, 18),
    "forced_eos_token_id": tokens | st.lists(tokens, min_size=1, max_size=3),
}


def options_of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: CHOICES[name] for name in names})
