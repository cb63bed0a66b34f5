"""Tokens in the form of responses: text and bytes."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidInput
from speccompile.guides.token_bytes import token_bytes
from speccompile.utils.mistral_common import is_mistral_common


class Vocabulary:
    """Single tokens of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Bytes by token id; empty if the tokenizer's decoder is not supported."""
        try:
            by_bytes = token_bytes(self._tokenizer)
        except InvalidInput:
            return {}
        return {token: text for text, tokens in by_bytes.items() for token in tokens}

    @cached_property
    def _special(self) -> frozenset[int]:
        if is_mistral_common(self._tokenizer):
            return frozenset(self._tokenizer.all_special_ids)
        # Marks of a chat are special, but often are not named special tokens.
        added = self._tokenizer.added_tokens_decoder
        return frozenset([*self._tokenizer.all_special_ids, *(token for token in added if added[token].special)])

    def is_special(self, token: int) -> bool:
        """Return whether ``token`` is left out of texts."""
        return token in self._special

    def bytes_of(self, token: int) -> bytes:
        """Bytes of ``token``; for a special token those of its name."""
        found = self._bytes.get(token)
        return str(self._tokenizer.decode([token])).encode() if found is None else found

    def text_of(self, token: int) -> str:
        r"""Text of ``token``; for a part of a character ``bytes:\xe2\x80``, as in the OpenAI API."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
