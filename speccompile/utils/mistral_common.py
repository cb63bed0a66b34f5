"""Tokenizers of mistral-common, which transformers has for folders with ``tekken.json`` alone.

They have neither a chat template nor added tokens: the library itself writes conversations, as tokens.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


def is_mistral_common(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether mistral-common tokenizes."""
    return getattr(tokenizer, "backend", None) == "mistral_common"


def writes_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``apply_chat_template`` writes conversations."""
    return getattr(tokenizer, "chat_template", None) is not None or is_mistral_common(tokenizer)


def library_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """mistral-common's own tokenizer of texts: a ``Tekkenizer`` or a ``SentencePieceTokenizer``."""
    wrapped: Any = tokenizer
    return wrapped.tokenizer.instruct_tokenizer.tokenizer
