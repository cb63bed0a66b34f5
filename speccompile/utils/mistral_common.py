"""Tokenizers of mistral-common. transformers uses them for folders that only have ``tekken.json``.

They have neither a chat template nor added tokens: the library converts conversations to tokens itself.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


def is_mistral_common(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``tokenizer`` is one of mistral-common."""
    return getattr(tokenizer, "backend", None) == "mistral_common"


def writes_chats(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether ``apply_chat_template`` works for ``tokenizer``."""
    return getattr(tokenizer, "chat_template", None) is not None or is_mistral_common(tokenizer)


def library_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return mistral-common's own tokenizer of text: a ``Tekkenizer`` or a ``SentencePieceTokenizer``."""
    wrapped: Any = tokenizer
    return wrapped.tokenizer.instruct_tokenizer.tokenizer
