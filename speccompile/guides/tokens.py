"""The tokenizer's tokens as llguidance reads them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidGuide
from speccompile.guides.token_bytes import token_bytes

#: Precedes a text that is split, for tokenizers that change the beginning of a text.
_MARK = ","


class GuideTokens:
    """Bytes of each token id, and llguidance's tokenizer over them.

    Args:
        texts: bytes of each token id. Those of a special token are its name.
        special: ids of special tokens, and ids without a token. A text only has them where a grammar names them.
        tokenizer: splits texts whose bytes are forced.
    """

    def __init__(self, texts: list[bytes], special: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
        self.texts = texts
        self.special = special
        self._special = frozenset(special)
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.texts)

    @functools.cached_property
    def for_llguidance(self) -> Any:
        """llguidance's ``LLTokenizer`` of these tokens.

        Raises:
            InvalidGuide: llguidance is not installed.
        """
        return llguidance().LLTokenizer(_Wrapper(self))

    def split(self, text: str) -> list[int]:
        """Token ids whose bytes are ``text``: as the tokenizer splits it, or else the longest token first."""
        for mark in ("", _MARK):
            before, ids = self._encode(mark), self._encode(mark + text)
            own = ids[len(before) :]
            written = b"".join(self.texts[token] for token in own) == text.encode()
            # A tokenizer reads the name of a special token as that token.
            if ids[: len(before)] == before and written and self._special.isdisjoint(own):
                return own
        greedy: list[int] = self.for_llguidance.greedy_tokenize(text)
        return greedy

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


class _Wrapper:
    """The attributes that ``LLTokenizer`` reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: GuideTokens) -> None:
        # LLTokenizer requires an EOS token. This one is beyond the vocabulary: masks get the EOS tokens of a request.
        self.eos_token_id = tokens.vocab_size
        self.tokens: Sequence[bytes] = [*tokens.texts, b"<end>"]
        self.special_token_ids = [*tokens.special, self.eos_token_id]
        self._split = tokens.split

    def __call__(self, text: str) -> list[int]:
        return self._split(text)


@functools.lru_cache(maxsize=4)
def _tokens(tokenizer: PreTrainedTokenizerBase, size: int) -> GuideTokens:
    texts = [b""] * size
    for text, ids in token_bytes(tokenizer).items():
        for token in ids:
            texts[token] = text
    special = [token for token, text in enumerate(texts) if not text]
    for name, token in tokenizer.get_vocab().items():
        texts[token] = texts[token] or name.encode()
    return GuideTokens(texts, special, tokenizer)


def guide_tokens(tokenizer: PreTrainedTokenizerBase) -> GuideTokens:
    """Return the tokens of ``tokenizer``. Those of the last four tokenizers are kept.

    Raises:
        InvalidInput: the tokenizer is not a fast one, or the bytes of its tokens are unknown.
    """
    # get_vocab() of mistral-common leaves out tokens whose bytes are not valid UTF-8.
    return _tokens(tokenizer, max(len(tokenizer), 1 + max(tokenizer.get_vocab().values())))


def llguidance() -> Any:
    """Import the library that follows grammars.

    Raises:
        InvalidGuide: the library is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        reason = "it needs the library llguidance: pip install 'speccompile[guided]'"
        raise InvalidGuide(what="guided decoding", reason=reason) from error
    return llguidance
