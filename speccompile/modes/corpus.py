"""The texts of the option ``corpus`` of a drafter, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from speccompile.errors import InvalidOption


def read_corpus(mode: str, corpus: Any, tokenizer: Any) -> list[list[int]]:
    """The token ids of each text of the option of ``mode``.

    Raises:
        InvalidOption: an entry is neither a str nor a list of ids, does not tokenise, or has no tokens.
    """

    def refuse(name: str, value: Any, reason: str) -> NoReturn:
        raise InvalidOption(where=f"mode {mode!r}", name=name, value=value, reason=reason)

    if isinstance(corpus, str) or not isinstance(corpus, Sequence):
        refuse("corpus", corpus, "it must be a list of texts, or of lists of token ids")
    if tokenizer is not None and not any(isinstance(text, str) for text in corpus):
        refuse("tokenizer", tokenizer, "it is only for a corpus of texts, and the corpus has no texts; leave it out")
    read = []
    for index, text in enumerate(corpus):
        if isinstance(text, str) and tokenizer is None:
            refuse("corpus", corpus, f"entry {index} is text: give tokenizer=")
        try:
            ids = tokenizer(text, add_special_tokens=False).input_ids if isinstance(text, str) else text
        except Exception as error:
            refuse("corpus", corpus, f"entry {index} does not tokenise ({type(error).__name__}: {error})")
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        whole = isinstance(ids, list | tuple) and all(isinstance(token, int) for token in ids)
        if not whole or any(isinstance(token, bool) for token in ids):
            refuse("corpus", corpus, f"entry {index} does not become a list of token ids")
        if not ids:
            refuse("corpus", corpus, f"entry {index} does not tokenise: it has no tokens")
        read.append(list(ids))
    return read


def check_tokens(mode: str, corpus: Any, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse a corpus with ids outside of the target's vocabulary.

    Raises:
        InvalidOption: the message names the id and its text.
    """
    for text, ids in enumerate(texts):
        if wrong := [token for token in ids if not 0 <= token < vocab_size]:
            reason = f"tokens must be in 0 .. {vocab_size - 1}, got {wrong[0]} in text {text}"
            raise InvalidOption(where=f"mode {mode!r}", name="corpus", value=corpus, reason=reason)
