"""A small tokenizer whose tokens are letters."""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


def tokenizer() -> PreTrainedTokenizerFast:
    """128 tokens of one to three letters, which are put together without a space: stop strings straddle them."""
    letters = "abcdefgh"
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    triples = ["".join(triple) for triple in itertools.product(letters, repeat=3)][::9][:56]
    words = [*letters, *pairs, *triples]
    merges = [(word[:-1], word[-1]) for word in [*pairs, *triples]]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
